"""Limits of a service (``sla``): their units, their contradictions, and rounding that keeps them satisfied."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Context

from launcher.config.inference import SlaConfig

LIMITS = {"latency_ms": "ms of a request", "ttft_ms": "ms to the first token", "tpot_ms": "ms per token", "throughput": "requests/s",
          "devices": "devices", "cost": "per million tokens"}  # fmt: skip
"""Limits and their units. ``throughput`` is a minimum, all others are maxima."""


def limits(sla: SlaConfig) -> dict[str, float]:
    """Returns the limits that are set."""
    return {name: float(value) for name in LIMITS if (value := getattr(sla, name)) is not None}


def outward(value: float, name: str, digits: int) -> float:
    """Rounds ``value`` to ``digits`` so that ``value`` itself keeps the result as a limit: up for a maximum, down for a minimum."""
    if name == "devices":
        return round(value)
    rounding = ROUND_FLOOR if name == "throughput" else ROUND_CEILING
    return float(Context(prec=digits, rounding=rounding).create_decimal_from_float(value))


def clash(sla: SlaConfig, output: int) -> str:
    """Describes a contradiction between the time limits for requests of ``output`` tokens; empty if there is none."""
    total, first, each = sla.latency_ms, sla.ttft_ms, sla.tpot_ms
    if total is not None and first is not None and first > total:
        return f"sla.ttft_ms={first:g} is above sla.latency_ms={total:g}: no request ends before its first token; lower it, or leave it out"
    if total is not None and each is not None and each * (output - 1) > total:
        return (
            f"sla.tpot_ms={each:g} for workload.output={output} tokens takes longer than sla.latency_ms={total:g} allows; "
            f"give {total / max(output - 1, 1):.3g} or less, or leave it out"
        )
    return ""
