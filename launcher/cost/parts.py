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
