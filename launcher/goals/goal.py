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
from trainer.shared.run.errors import ConfigError

if TYPE_CHECKING:
    from launcher.sweep.search import SearchOutcome
    from launcher.trials.store import Record

FOLDERS = {("train", "speed"): "training", ("train", "loss"): "loss", ("inference", "speed"): "serving"}
"""Folders of the goals, by ``task`` and ``goal``."""
OF_LOSS = ("search.target_loss", "search.arms", "search.seeds", "search.confidence", "search.target_cluster")
"""Keys of a search for a loss."""
Wanted = Mapping[str, list[Any]]
"""Values to which layout keys are restricted, by column."""


@dataclass(frozen=True)
class Asked:
    """The ``overrides`` of a search, and the function that composes a configuration of such."""

    overrides: Sequence[str]
    compose: Callable[[Sequence[str]], Config]

    def but(self, words: Sequence[str], without: Sequence[str] = ()) -> Config:
        """Returns the configuration with further overrides, and without those of some sections."""
        return self.compose([*(word for word in self.overrides if section_of(word) not in without), *words])


def section_of(override: str) -> str:
    """Returns the section or config group that an override is of."""
    return override.lstrip("+~").partition("=")[0].partition(".")[0].partition("@")[0]


class GoalPlan(Protocol):
    """All predictions, for ``trireme plan``."""

    @property
    def found(self) -> bool:
        """Tells whether a row fits and keeps the limits."""

    def heading(self) -> str:
        """Describes model, workload and cluster in one line."""

    def answer(self, top: int, seconds: float, words: Sequence[str]) -> Answer:
        """Returns the rows to choose from and the next command; lists show ``top`` rows. ``seconds`` is the time that predicting took,
        ``words`` are the command's arguments."""

    def explained(self, row: str, picture: Path | None) -> Answer:
        """Returns every part of one row, given by its place or name. Draws its timeline into ``picture``, if it has one."""

    def measures(self, count: int, overrides: Sequence[str]) -> Answer:
        """Returns the rows whose measurement reduces uncertainty most."""


@dataclass(frozen=True)
class Written:
    """Files that a search has written: recipes by name, the winner as its trainer's command, constants learnt about the machine."""

    recipes: Mapping[str, Path] = field(default_factory=dict)
    command: Path | None = None
    learnt: Path | None = None


class GoalSearch(Protocol):
    """A search that is about to run: its candidates and its reports. ``found`` is its outcome."""

    problem: Any  # a ``Searched``
    teaches: bool  # whether its trials calibrate the cost model's constants for this machine

    def size(self) -> str:
        """Returns the number of candidates, in words."""

    def most_gpu_hours(self) -> float | None:
        """Returns the GPU-hours that its trials are predicted to take at most; None if nothing limits them."""
        limit: float | None = self.problem.config.search.max_gpu_hours
        return limit

    def line(self, trial: SearchTrial, record: Record, measured: TrialObservation) -> str:
        """Describes one trial as it ends."""

    def won(self, found: SearchOutcome[Any]) -> bool:
        """Tells whether a measured candidate can be recommended."""

    def front(self, found: SearchOutcome[Any]) -> dict[str, Any]:
        """Returns the data that report and MLflow show besides the ranking."""
        return {}

    def recipes(self, found: SearchOutcome[Any], default: Config) -> dict[str, tuple[dict[str, Any], str]]:
        """Returns each recommendation by the name of its recipe: its changes to ``default``, and a description."""

    def files(self, name: str, found: SearchOutcome[Any]) -> dict[str, str]:
        """Returns the winner of the search ``name`` as files for its trainer, by file name."""
        return {}

    def document(self, name: str, found: SearchOutcome[Any], written: Written) -> dict[str, Any]:
        """Returns the outcome as plain data."""


@dataclass(frozen=True)
class GoalTable:
    """A table of measured runs: each row's prediction or the reason why it has none, the number of predictions, their errors, and repeats
    of a layout that contradict each other."""

    lines: Sequence[Sequence[Any]]
    predicted: int
    answer: Answer
    repeats: Sequence[Sequence[Repeat]] = ()


@dataclass(frozen=True)
class Goal:
    """An objective of plans and searches. ``foreign`` keys have no meaning for it; each says what to do about it."""

    foreign: Mapping[str, str]
    plan: Callable[[Config, Wanted], GoalPlan]
    check: Callable[[Config], None]  # raises ``ConfigError`` for a run that cannot be measured
    search: Callable[[Config, Wanted, Asked], GoalSearch]
    shown: Callable[[Mapping[str, Any]], Iterable[View]]  # a search's document, for people
    recipes: Mapping[str, str]  # suffixes of the names of a search's recipes
    measured: str  # noun for the rows of a table
    columns: Sequence[str]  # of a row's prediction
    table: Callable[[str, TrainerProfile | None, bool], GoalTable]  # of a file, by a trainer, sweep by sweep too
    unmeasured: str = ""  # reason why the most informative runs are not listed; empty if they are
    fixed: str = ""  # name of a complete table, whose predictions do not depend on options; else empty


def goal_of(task: str, goal: str = "speed") -> Goal:
    """Returns the goal of a ``task``. Raises ``ConfigError`` if the task has no such goal."""
    if (task, goal) not in FOLDERS:
        raise ConfigError(f"goal={goal} has no meaning for task={task}; leave it out")
    found: Goal = import_module(f"launcher.goals.{FOLDERS[task, goal]}.goal").GOAL
    return found
