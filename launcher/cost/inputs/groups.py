"""Groups of ranks by where they lie: how many of them share a link domain, and through how many network ports they leave it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from launcher.cost.inputs.device import Device
from launcher.cost.inputs.shape import Number


@dataclass(frozen=True)
class PlacedGroup:
    """``size`` ranks that talk to each other, ``near`` of them in one link domain, sending through ``rails`` network ports of it."""

    size: Number
    near: Number
    rails: Number

    @classmethod
    def of(cls, device: Device, size: Number, stride: Number, single_rail: bool = False) -> PlacedGroup:
        """A group whose neighbours are ``stride`` ranks apart; domains are filled rank by rank."""
        near = np.minimum(size, np.maximum(device.domain // np.maximum(stride, 1), 1))
        return cls(size, near, 1 if single_rail else near)

    @property
    def far(self) -> Number:
        """Link domains that the group spans."""
        return np.ceil(self.size / self.near)
