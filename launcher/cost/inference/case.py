"""One question about inference: a model, many layouts with their batches, lengths, a device, an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from launcher.config.engine import EngineProfile
from launcher.cost.inference.constants import INFERENCE, LIGHT, InferenceConstants
from launcher.cost.inputs.constants import SHIPPED, Constants
from launcher.cost.inputs.device import BYTES, Device
from launcher.cost.inputs.groups import PlacedGroup
from launcher.cost.inputs.shape import Array, Shape
from trainer.shared.families import block

SERVING_DTYPE = np.dtype([("tensor", "i4"), ("pipeline", "i4"), ("replicas", "i4"), ("batch", "i4")])
"""A layout of a served model: ranks of a replica, replicas, and requests in flight per replica."""

NINE_OF_TEN = 1.645
"""Half-width, in standard errors, of the interval that holds nine of ten."""


@dataclass(frozen=True)
class HostCosts:
    """Seconds of the host in our generator, as ``trireme doctor`` measured them: of a turn on each stage, of a block, of choosing a token,
    and of that per entry of the vocabulary; and of a small message of ranks that computed before (``waking``), by operation and by whether
    it crosses the network: log2 of group sizes, and seconds."""

    turn: float
    block: float
    row: float
    logit: float
    waking: Mapping[tuple[str, bool], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    @classmethod
    def of(cls, calibration: Mapping[str, Any]) -> HostCosts | None:
        """Reads the costs from the calibration of a hardware file; None if it has none."""
        if "turn" not in calibration:
            return None
        found: dict[tuple[str, bool], list[tuple[float, float]]] = {}
        for one in calibration.get("waking", ()):
            found.setdefault((one["operation"], one["near"] < one["size"]), []).append((np.log2(one["size"]), one["seconds"]))
        tables = {kind: np.array(sorted(points)).T for kind, points in found.items()}
        return cls(**calibration["turn"], waking={kind: (sizes, seconds) for kind, (sizes, seconds) in tables.items()})

    def woken(self, operation: str, size: Array, far: Array) -> Array | None:
        """Seconds of a small message over ``size`` ranks; None where that was not measured. Constant outside of the measured range."""
        near, between = (self.waking.get((operation, crosses)) for crosses in (False, True))
        if (first := near or between) is None:
            return None
        inside, outside = (np.interp(np.log2(size), *(known or first)) for known in (near, between))
        return np.where(far, outside, inside)


@dataclass(frozen=True)
class InferenceCase:
    """``table`` is (layouts,) of ``SERVING_DTYPE``; ``input``, ``output`` and the sizes of ``shape`` are numbers, or (layouts,)."""

    shape: Shape
    table: np.ndarray
    input: Array
    output: Array
    device: Device
    engine: EngineProfile
    weights: str = "bf16"
    kv: str = "bf16"
    constants: InferenceConstants = INFERENCE
    network: Constants = SHIPPED  # of collectives: links, network, and sends
    costs: HostCosts | None = None  # where they were measured, and the engine is our own

    @cached_property
    def tensor(self) -> np.ndarray:
        return self.table["tensor"].astype(float)

    @cached_property
    def pipeline(self) -> np.ndarray:
        return self.table["pipeline"].astype(float)

    @cached_property
    def replicas(self) -> np.ndarray:
        return self.table["replicas"].astype(float)

    @cached_property
    def batch(self) -> np.ndarray:
        """Requests in flight per replica."""
        return self.table["batch"].astype(float)

    @cached_property
    def tensor_group(self) -> PlacedGroup:
        return PlacedGroup.of(self.device, self.tensor, 1)

    @cached_property
    def stages_apart(self) -> np.ndarray:
        """True where neighbouring stages are in different link domains."""
        return self.tensor * self.pipeline > self.device.domain

    @cached_property
    def crowding(self) -> np.ndarray:
        """Slow-down of ranks that share the cores of the host: of a replica's stages one is busy at a time."""
        ranks = np.minimum(self.tensor * self.pipeline * self.replicas, self.device.domain)
        return self._slower(ranks / self.pipeline)

    @cached_property
    def sharing(self) -> np.ndarray:
        """That of the ranks of one stage by each other alone."""
        return self._slower(np.minimum(self.tensor, self.device.domain))

    def _slower(self, busy: np.ndarray) -> np.ndarray:
        """Slow-down of so many ranks of a node that are busy at once."""
        if not self.device.ranks_per_core:
            return np.ones_like(self.tensor)
        return np.maximum(busy * self.device.ranks_per_core / self.device.domain, 1.0)

    @property
    def width(self) -> float:
        """Bytes of an activation element."""
        return max(BYTES[self.weights], 2)

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight. Sixteen weights of 4 bits share a scale of 8 (NVFP4: Transformer Engine's user guide)."""
        return BYTES[self.weights] + (1 / 16 if self.weights == "fp4" else 0.0)

    @property
    def vectors(self) -> str:
        """Number format of attention and head: low-precision weights leave them in 16 bits."""
        return "bf16" if self.weights in ("fp8", "fp4") else self.weights

    @cached_property
    def sparse(self) -> Array:
        """Share of the layers that have experts in place of an MLP."""
        return self.shape.expert_layers / self.shape.layers

    @cached_property
    def rank_parameters(self) -> Array:
        """Matrix parameters of a layer on one rank that every token is multiplied with, the mean of all layers: routed experts left out."""
        s = self.shape
        attention = (s.attention_parameters - s.latent_parameters) / self.tensor + s.latent_parameters
        return attention + (1 - self.sparse) * s.mlp_parameters / self.tensor + self.sparse * self.shared_parameters

    @property
    def shared_parameters(self) -> Array:
        """Matrix parameters on one rank of what a layer with experts has beside those: shared ones, split, and the router, whole."""
        s = self.shape
        if s.experts is None:
            return 0.0
        router = block.router(s, s.experts).elements
        return (s.shared_mlp_parameters - router) / self.tensor + router

    @cached_property
    def expert_parameters(self) -> Array:
        """Matrix parameters of one routed expert on one rank: every tensor rank has a part of each."""
        return 0.0 if self.shape.experts is None else self.shape.expert_parameters / self.shape.experts.count / self.tensor

    @cached_property
    def kv_per_token(self) -> np.ndarray:
        """Bytes of keys and values, or of latents, per token and layer on one rank: heads are copied where there are more ranks than
        heads."""
        return np.maximum(self.shape.cached_heads / self.tensor, 1) * self.shape.cached_width * BYTES[self.kv]

    @property
    def error_spread(self) -> float:
        """Relative standard error of a time."""
        return self.constants.error_spread if self.shape.experts is None else self.constants.mixture_spread

    @property
    def layout_spread(self) -> float:
        """That of one layout and batch against others."""
        return self.constants.layout_spread if self.shape.experts is None else self.constants.mixture_layout_spread

    @property
    def context(self) -> Array:
        """Tokens that a decoded token sees on average."""
        return self.input + self.output / 2

    def at_light(self) -> InferenceCase:
        """The same at the speed of light."""
        device = dataclasses.replace(self.device, sustained=self.device.peaks, measured=None)
        return dataclasses.replace(
            self,
            device=device,
            costs=self.costs and HostCosts(0.0, 0.0, 0.0, 0.0),
            constants=self.constants.on(LIGHT),
            network=self.network.on(FAST),
        )


def visited(case: InferenceCase, tokens: Array) -> Array:
    """Experts of a layer that any of ``tokens`` visits, if each draws its ``k`` of ``E`` by chance: E (1 - (1 - k / E)^tokens)."""
    e = case.shape.experts
    return 0.0 if e is None else e.count * (1 - (1 - np.asarray(e.active / e.count)) ** np.asarray(tokens, float))


def group(case: InferenceCase, tokens: Array, batch: Array) -> np.ndarray:
    """Requests of one of the groups that fill a pipeline, of ``tokens`` each. Static batches: a stage's share of the batch if that is
    whole, halved while a group has more than ``pipeline_tokens`` tokens and an even number of requests. A scheduler of continuous batching
    deals requests out one by one: a stage's share, rounded up."""
    size, most = np.asarray(batch), case.engine.pipeline_tokens
    if case.engine.batching == "continuous":
        size = np.ceil(size / case.pipeline)
    else:
        size = np.where(size % case.pipeline == 0, size / case.pipeline, size)
    while most and np.any(large := (size * tokens > most) & (size % 2 == 0) & (size > 1)):
        size = np.where(large, size / 2, size)
    return np.where((case.pipeline > 1) & case.engine.pipeline_groups, size, batch)


FAST = {"link": 1.0, "network": 1.0, "launch": 0.0, "crowd": 0.0, "ramp": 0.0}
"""Collectives at the speed of light."""
