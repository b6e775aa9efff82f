"""Nodes that a trial's next attempt leaves out, because an earlier one failed there through their fault. Pure.

An exclusion ends after ``cluster.avoid_s``: nodes are repaired. It is also dropped where not enough other nodes are there, the oldest
first: an attempt on a node that may be bad is worth more than one that can never start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Exclusion:
    """A node that was at fault, when it was last."""

    node: str
    attempt: int
    until: float  # unix seconds


def exclusions(history: Sequence[Mapping[str, Any]], seconds: float, now: float) -> list[Exclusion]:
    """Returns the exclusions in force at ``now``, the oldest first. ``history`` is that of ``Record``."""
    newest: dict[str, Exclusion] = {}
    for attempt in sorted(history, key=lambda attempt: attempt.get("ended") or 0.0):
        for node in attempt.get("bad_nodes", ()):
            newest.pop(node, None)  # the order is that of the last fault
            newest[node] = Exclusion(node, attempt.get("attempt", 0), (attempt.get("ended") or 0.0) + seconds)
    return [exclusion for exclusion in newest.values() if exclusion.until > now]


def choose(wanted: Sequence[Exclusion], possible: Callable[[tuple[str, ...]], bool]) -> list[Exclusion]:
    """Returns as many of ``wanted`` as leave enough nodes, as ``possible`` decides."""
    for start in range(len(wanted)):
        if possible(names(wanted[start:])):
            return list(wanted[start:])
    return []


def names(chosen: Sequence[Exclusion]) -> tuple[str, ...]:
    return tuple(sorted(exclusion.node for exclusion in chosen))


def words(wanted: Sequence[Exclusion], chosen: Sequence[Exclusion]) -> str:
    """Describes which nodes are avoided until when, and which could not be; empty without any."""
    dropped = [exclusion for exclusion in wanted if exclusion not in chosen]
    left_out = [f"{e.node} (at fault in attempt {e.attempt}, until {time.strftime('%H:%M', time.localtime(e.until))})" for e in chosen]
    again = [f"{e.node} (at fault in attempt {e.attempt})" for e in dropped]
    parts = [f"leaves out {', '.join(left_out)}" if left_out else ""]
    parts += [f"uses {', '.join(again)} again, without which there are not enough nodes" if again else ""]
    return "; ".join(filter(None, parts))
