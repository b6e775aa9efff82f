"""How many examples a property draws: few in the gate, where every run draws the same, and many where fresh ones are drawn."""

from __future__ import annotations

from hypothesis import settings


def draws(gate: int, campaign: int) -> settings:
    """Hypothesis' settings for a property: ``gate`` examples in every run, ``campaign`` with ``--hypothesis-profile fresh``."""
    return settings(max_examples=gate if settings.default.derandomize else campaign)
