"""Seconds or bytes by named part."""

from __future__ import annotations

from launcher.cost.inputs.shape import Array

Parts = dict[str, Array]
"""Seconds or bytes by part; each a number, or one per layout (layouts,)."""
ForwardBackward = tuple[Array, Array]
"""Seconds forward and backward; each a number, or (layouts,)."""

MATRICES, ATTENTION, POINTWISE = "matrix products", "attention", "memory-bound operations"
TENSOR, CONTEXT, EXPERT, HOST = (
    "tensor-parallel communication",
    "context-parallel communication",
    "expert-parallel communication",
    "launching",
)
EMBEDDING, HEAD = "embedding", "head and loss"
TRANSFERS, BUBBLE = "pipeline transfers", "pipeline bubble"
GATHER, REDUCE, UPDATE, STEP = "parameter gathers", "gradient reduction", "optimizer", "fixed cost of a step"
OFFLOAD = "copies to host memory"
WIDTH_OF_PART = (
    dict.fromkeys((MATRICES, ATTENTION, POINTWISE), "part")
    | dict.fromkeys((TENSOR, CONTEXT, EXPERT), "communication")
    | {HOST: "host", EMBEDDING: "part", HEAD: "part", TRANSFERS: "communication", BUBBLE: "bubble"}
    | {GATHER: "communication", REDUCE: "communication", UPDATE: "part", OFFLOAD: "part", STEP: "host"}
)
"""The parts of a step, in their order, and which of ``Widths`` says how far each may be off."""

RATED = (MATRICES, ATTENTION, HEAD)
"""Parts that mostly run on a device's matrix units."""


def total(parts: Parts) -> Array:
    return sum(parts.values())


def add(*several: Parts) -> Parts:
    out: Parts = {}
    for parts in several:
        for name, value in parts.items():
            out[name] = out.get(name, 0.0) + value
    return out


def scale(parts: Parts, factor: Array) -> Parts:
    return {name: value * factor for name, value in parts.items()}
