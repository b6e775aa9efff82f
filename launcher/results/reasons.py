"""Reasons for which the fastest trial wins, by the parts of a step, and commands that may find a faster one. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.trials.store import Record
from trainer.shared.records.stage_run import trains

MOST_PARTS = 4
LEAST_SHARE = 0.02
"""Differences below this share of the whole step are not worth a line."""
MORE_STEPS = 4
"""Times as many steps halve the interval of a median."""
OWN = ("layout", "sweep.name", "sweep.rerun", "search", "dry_run", "hydra")
"""Keys of a trial's command that another command for the same run decides itself."""


@dataclass(frozen=True)
class PartDifference:
    """One part of a step, in seconds: of the winner, and of the trial that it is compared with."""

    part: str
    winner: float
    other: float

    @property
    def saved(self) -> float:
        return self.other - self.winner


def largest_differences(winner: Mapping[str, float], other: Mapping[str, float]) -> list[PartDifference]:
    """Returns the parts that differ most, the largest first; those of one that are missing in the other count as 0. Empty where one has
    none."""
    if not winner or not other:
        return []
    found = [PartDifference(part, winner.get(part, 0.0), other.get(part, 0.0)) for part in dict.fromkeys([*winner, *other])]
    whole = max(sum(winner.values()), sum(other.values()))
    told = [each for each in found if abs(each.saved) >= LEAST_SHARE * whole]
    return sorted(told, key=lambda each: -abs(each.saved))[:MOST_PARTS]


def next_commands(leaders: Sequence[Record]) -> list[tuple[str, str]]:
    """Returns what to try after a sweep, each as reason and command: more steps where ``leaders``, the fastest first, cannot be told apart,
    and a search for layouts that the sweep has not. Commands with variables of the environment, which may be secret, are not repeated."""
    known = [record for record in leaders if trains(record.config) and not record.stage and not any(map(_secret, record.overrides))]
    if not known or len(known) < len(leaders):
        return []
    made = []
    if len(known) > 1:
        steps = MORE_STEPS * int(known[0].config.get("run", {}).get("steps", 0))
        for record in known[:2]:
            kept = [word for word in record.overrides if _key(word) not in ("run.steps", "sweep.name")]
            made.append(("More steps may tell the fastest apart", _command("train", [*kept, f"run.steps={steps}"])))
    if (known[0].cluster.get("hardware") or {}).get("peak_tflops") and not known[0].config.get("command"):
        rest = [word for word in known[0].overrides if not _key(word).startswith(OWN)]
        made.append(("A layout that this sweep has not may be faster; what is measured is not measured again", _command("search", rest)))
    return made


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _secret(word: str) -> bool:
    return _key(word).startswith("cluster.env")


def _command(verb: str, words: Sequence[str]) -> str:
    return shlex.join(["trireme", verb, *words])
