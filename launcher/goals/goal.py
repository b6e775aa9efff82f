"""The interface between verbs and goals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from launcher.config import Config
from launcher.config.trainer import TrainerProfile
from launcher.goals.views import Answer, View
from launcher.search.policy import SearchTrial, TrialObservation
from launcher.tables.repeats import Repeat

if TYPE_CHECKING:
    from launcher.sweep.search import SearchOutcome
    from launcher.trials.store import Record

FOLDERS = {"train": "training", "inference": "serving"}
"""Folders of the goals, by ``task``."""
Wanted = Mapping[str, list[Any]]
"""Values that layout keys are kept to, by column."""


class GoalPlan(Protocol):
    """Everything predicted, for ``trireme plan``."""

    @property
    def found(self) -> bool:
        """Whether something fits, and keeps the limits."""

    def heading(self) -> str:
        """Returns model, work and cluster in one line."""

    def answer(self, top: int, seconds: float, words: Sequence[str]) -> Answer:
        """Returns what to choose from, and what to type next; lists show ``top`` rows. ``seconds`` is what predicting took, ``words`` are
        those of the command."""

    def explained(self, row: str, picture: Path) -> Answer:
        """Returns every part of one row, given by its place or name, and draws its timeline if it has one."""

    def measures(self, count: int, overrides: Sequence[str]) -> Answer:
        """Returns the rows of which measurements teach most."""


@dataclass(frozen=True)
class Written:
    """Files that a search has written: recipes by name, the winner in its trainer's own words, what was learnt of the machine."""

    recipes: Mapping[str, Path] = field(default_factory=dict)
    command: Path | None = None
    learnt: Path | None = None


class GoalSearch(Protocol):
    """A search that is about to run: its candidates, and what is told of it. ``found`` is how it went."""

    problem: Any  # a ``Searched``
    teaches: bool  # whether its trials say what the cost model's constants are on this machine

    def size(self) -> str:
        """Returns how many candidates there are, in words."""

    def line(self, trial: SearchTrial, record: Record, measured: TrialObservation) -> str:
        """Returns one trial as it ends."""

    def won(self, found: SearchOutcome[Any]) -> bool:
        """Whether something that was measured can be recommended."""

    def front(self, found: SearchOutcome[Any]) -> dict[str, Any]:
        """Returns what report and MLflow show besides the ranking."""
        return {}

    def recipes(self, found: SearchOutcome[Any], default: Config) -> dict[str, tuple[dict[str, Any], str]]:
        """Returns each recommendation by the name of its recipe: what differs from ``default``, and what it is."""

    def files(self, name: str, found: SearchOutcome[Any]) -> dict[str, str]:
        """Returns the winner of the search ``name`` in its trainer's own words, by file name."""
        return {}

    def document(self, name: str, found: SearchOutcome[Any], written: Written) -> dict[str, Any]:
        """Returns what was found, as plain data."""


@dataclass(frozen=True)
class GoalTable:
    """A table of measured runs: each row's prediction or the reason why it has none, how many have one, how good they are, and repeats of
    a layout that contradict each other."""

    lines: Sequence[Sequence[Any]]
    predicted: int
    answer: Answer
    repeats: Sequence[Sequence[Repeat]] = ()


@dataclass(frozen=True)
class Goal:
    """One thing that is sought. ``foreign`` keys have no meaning for it, and ``remedy`` says what to do about one."""

    foreign: Sequence[str]
    remedy: str
    plan: Callable[[Config, Wanted], GoalPlan]
    check: Callable[[Config], None]  # ``ConfigError`` for what cannot be measured
    search: Callable[[Config, Wanted], GoalSearch]
    shown: Callable[[Mapping[str, Any]], Iterable[View]]  # a search's document, for people
    recipes: Mapping[str, str]  # what the names of a search's recipes end in
    measured: str  # what the rows of a table are
    columns: Sequence[str]  # of a row's prediction
    table: Callable[[str, TrainerProfile | None, bool], GoalTable]  # of a file, by a trainer, sweep by sweep too
    unmeasured: str = ""  # why no runs are named that teach most; empty where they are
    fixed: str = ""  # how a table is called that says all itself, so that no option changes what is predicted


def goal_of(task: str) -> Goal:
    """Returns the goal of a ``task``."""
    goal: Goal = import_module(f"launcher.goals.{FOLDERS[task]}.goal").GOAL
    return goal
