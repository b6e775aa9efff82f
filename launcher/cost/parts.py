"""Seconds or bytes by named part."""

from __future__ import annotations

from launcher.cost.inputs.shape import Number

Parts = dict[str, Number]
"""Seconds or bytes by part."""

MATRICES, ATTENTION, POINTWISE = "matrix products", "attention", "memory-bound operations"
TENSOR, CONTEXT, EXPERT, HOST = (
    "tensor-parallel communication",
    "context-parallel communication",
    "expert-parallel communication",
    "launching",
)


def total(parts: Parts) -> Number:
    return sum(parts.values())


def add(*several: Parts) -> Parts:
    out: Parts = {}
    for parts in several:
        for name, value in parts.items():
            out[name] = out.get(name, 0.0) + value
    return out


def scale(parts: Parts, factor: Number) -> Parts:
    return {name: value * factor for name, value in parts.items()}
