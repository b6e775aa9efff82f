"""Groups of ranks by where they lie: how many of them share a link domain, and through how many network ports they leave it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from launcher.cost.inputs.device import Device
from launcher.cost.inputs.shape import Array


@dataclass(frozen=True)
class PlacedGroup:
    """``size`` ranks that talk to each other, ``near`` of them in one link domain, sending through ``rails`` network ports of it;
    each a number, or (layouts,)."""

    size: Array
    near: Array
    rails: Array

    @classmethod
    def of(cls, device: Device, size: Array, stride: Array) -> PlacedGroup:
        """A group whose neighbours are ``stride`` ranks apart; domains are filled rank by rank."""
        near = np.minimum(size, np.maximum(device.domain // np.maximum(stride, 1), 1))
        return cls(size, near, near)

    @cached_property
    def far(self) -> Array:
        """Link domains that the group spans."""
        return np.ceil(self.size / self.near)
