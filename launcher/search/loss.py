"""Searches the arm that reaches a loss soonest: chooses the next run, and holds the results of each arm. Pure.

All layouts train one model, so the steps that an arm needs are measured once, in any layout, and are multiplied by the step time on the
cluster whose time counts: measured, if the trials run there in that layout, else predicted for the fastest layout there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

import numpy as np

from launcher.config.schema import ClusterConfig, Config
from launcher.config.uncertainty import Widths
from launcher.cost.uncertainty import Traits, between, columns, coordinates
from launcher.labels import percent, plural
from launcher.planning.layout_names import overrides_of
from launcher.planning.plan import Plan
from launcher.search.arms import Curve, Evidence, Reach, StepTimes, crossing
from launcher.search.branches import Trunk
from launcher.search.policy import SearchTrial, Stop, TrialObservation, at_most, limit_reached
from trainer.shared.records.outcome import Reason
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.phases import Phase, PhaseTable
from trainer.shared.run.schema import LayoutConfig, PhaseConfig


@dataclass(frozen=True)
class FastestLayout:
    """The layout that is predicted to be the fastest on the cluster whose time counts."""

    plan: Plan
    row: int
    phases: Sequence[PhaseConfig] = ()  # of the run that it is for

    @property
    def layout(self) -> LayoutConfig:
        return self.plan.layout(self.row)

    @property
    def batch(self) -> int:
        return int(np.broadcast_to(self.plan.case.global_batch, len(self.plan.space.table))[self.row])

    def same(self, other: FastestLayout) -> bool:
        """Returns whether both are one layout with one batch, whose error of its own they share."""
        return (
            self.batch == other.batch
            and self.phases == other.phases
            and self.plan.space.table[self.row] == other.plan.space.table[other.row]
        )


@dataclass(frozen=True)
class Arm:
    """A way to train: the overrides ``words`` and what they make, as it is run with the first seed, and as it is asked for where its time
    counts. ``fastest``: its layout there; None if its trials run there."""

    name: str
    words: Sequence[str]
    config: Config
    asked: Config
    fastest: FastestLayout | None = None
    trunk: Trunk | None = None  # of which its runs are branches; None: each run is whole
    phases: Sequence[tuple[int, float]] = ()  # a step of each phase, from 1, and its seconds, where they are predicted

    @property
    def pieces(self) -> range:
        """Returns the numbers of the trainings of a seed."""
        return range(1) if self.trunk is None else self.trunk.pieces

    @property
    def table(self) -> PhaseTable:
        """Returns the phases of the arm; a run without any is one."""
        return PhaseTable.of(self.config.run, self.config.model.seq)

    def tokens(self, steps: float) -> float:
        """Returns the tokens of so many steps."""
        return sum(count * phase.global_batch * phase.seq for phase, count in self._counts(steps))

    def mean_step_s(self, times: Sequence[tuple[int, float]], steps: float) -> float | None:
        """Returns the mean of so many steps, from the seconds of one of each phase; None if some phase has none."""
        known = {self.table.at(step - 1): seconds for step, seconds in times}
        counts = self._counts(steps)
        return sum(count * known[phase] for phase, count in counts) / steps if all(phase in known for phase, _ in counts) else None

    def _counts(self, steps: float) -> list[tuple[Phase, float]]:
        return [(phase, min(count, steps - phase.first)) for phase, count in self.table.reached(math.ceil(steps))]


@dataclass(frozen=True)
class LossProblem:
    """The arms of a search. ``config`` is the run that they change."""

    config: Config
    target_loss: float
    arms: Sequence[Arm]

    def policy(self) -> LossPolicy:
        """The search of these arms, from its beginning."""
        return LossPolicy(self)

    @property
    def cluster(self) -> ClusterConfig:
        """Returns the cluster whose time counts."""
        return self.arms[0].asked.cluster

    @property
    def predicts(self) -> bool:
        """Returns whether step times are predicted, not measured."""
        return self.arms[0].fastest is not None

    @cached_property
    def believed(self) -> StepTimes:
        """Returns the predicted step times of all arms, whose errors have most in common."""
        found = [arm.fastest for arm in self.arms if arm.fastest]
        parts = np.concatenate([columns(one.plan.estimate.causes, len(one.plan.seconds))[[one.row]] for one in found])
        seconds = parts.sum(axis=1)
        places = np.concatenate([coordinates(one.plan.space.table[[one.row]]) for one in found])
        same = np.array([[one.same(other) for other in found] for one in found])
        widths: Widths = found[0].plan.widths
        traits = Traits(parts / seconds[:, None], places)
        mean_square = math.exp(2 * widths.scale**2)  # of the log-normal size of what no part explains
        return StepTimes(np.log(seconds), between(widths, traits, traits, same).at(mean_square))

    def arm_of(self, trial: SearchTrial) -> Arm:
        return self.arms[trial.index % len(self.arms)]

    def piece_of(self, trial: SearchTrial) -> int:
        """Returns which training of its arm and seed a trial is: candidates are those of all arms, then the branches of all arms."""
        return trial.index // len(self.arms)

    def trial_config(self, trial: SearchTrial) -> Config:
        """The run of one arm with one seed, or a piece of it."""
        arm = self.arm_of(trial)
        config = dataclasses.replace(arm.config, run=dataclasses.replace(arm.config.run, seed=arm.config.run.seed + trial.repeats))
        return config if arm.trunk is None else arm.trunk.of(config, self.piece_of(trial))

    def predicted(self, trial: SearchTrial) -> None:
        """Has no prediction of a trial: where its time counts, it is measured or predicted for another layout."""

    def interval(self, trial: SearchTrial) -> None:
        """Has none, likewise."""

    def words(self, trial: SearchTrial) -> list[str]:
        """The overrides that make the trial, for the record."""
        arm, config = self.arm_of(trial), self.trial_config(trial)
        run = config.run
        words = [word for word in arm.words if not word.startswith("layout.")] + overrides_of(arm.config.layout)
        batches = [] if run.eval_batches == self.config.run.eval_batches else [f"run.eval_batches={run.eval_batches}"]
        return [*words, *batches, f"run.seed={run.seed}", *([] if arm.trunk is None else arm.trunk.words(config))]


@dataclass
class LossPolicy:
    """Runs the arms seed by seed until one is told to be the fastest, or each has its ``search.seeds`` runs; holds their results."""

    problem: LossProblem
    runs: list[dict[int, Reach | None]] = field(init=False)  # of each arm, by number of the seed
    curves: list[dict[int, Curve]] = field(init=False)
    told: dict[tuple[int, int, int], TrialObservation] = field(default_factory=dict)  # by arm, seed and piece
    trials: int = 0
    gpu_hours: float = 0.0
    hours: float = 0.0

    def __post_init__(self) -> None:
        arms = self.problem.arms
        self.runs, self.curves = [{} for _ in arms], [{} for _ in arms]

    def ask(self, count: int = 1) -> list[SearchTrial] | Stop:
        """Up to ``count`` runs: those of one seed before those of the next."""
        settings, evidence = self.problem.config.search, self.evidence
        if evidence.complete:
            sure = f"an arm is told to be the fastest ({percent(settings.confidence, digits=0)} confidence)"
            return Stop(sure if evidence.winner is not None else f"each arm that is left has {plural(settings.seeds, 'seed')}")
        if limit := limit_reached(settings, self.trials, self.gpu_hours, self.hours):
            return Stop(limit)
        left = sorted((seed, arm) for arm in evidence.open for seed in range(settings.seeds) if seed not in self.runs[arm])
        wanted = [(seed, arm, piece) for seed, arm in left for piece in self._next(arm, seed)]
        arms = len(self.problem.arms)
        return [SearchTrial(arm + arms * piece, True, None, seed) for seed, arm, piece in wanted[: at_most(settings, self.trials, count)]]

    def _next(self, arm: int, seed: int) -> list[int]:
        """Returns the pieces of a run that can be trained now: branches begin where the trunk has been."""
        pieces = self.problem.arms[arm].pieces
        return [0] if (arm, seed, 0) not in self.told else [piece for piece in pieces if (arm, seed, piece) not in self.told]

    def tell(self, trial: SearchTrial, measured: TrialObservation) -> None:
        """Records a run: when it reached the loss, or that it did not. A run whose numbers broke never reaches it; one that failed
        otherwise says nothing."""
        self.trials, self.gpu_hours, self.hours = self.trials + 1, self.gpu_hours + measured.gpu_hours, self.hours + measured.hours
        arm, seed, piece = trial.index % len(self.runs), trial.repeats, self.problem.piece_of(trial)
        self.told[arm, seed, piece] = measured
        if self.problem.arms[arm].trunk is not None:
            self._tell_branches(arm, seed)
            return
        self._tell(arm, seed, measured, measured.losses, crossing(measured.losses, self.problem.target_loss))

    def _tell_branches(self, arm: int, seed: int) -> None:
        """Records a run whose trunk broke, or whose pieces are all there: each branch has the loss of its end."""
        trunk, *rest = self.problem.arms[arm].pieces
        measured = self.told[arm, seed, trunk]
        if measured.ran and self._next(arm, seed):
            return
        ends = [self.told.get((arm, seed, piece), measured) for piece in rest]
        curve = [one.losses[-1] for one in ends if one.ran and one.losses]
        steps = crossing(curve, self.problem.target_loss, consecutive=1)
        broken = next((one for one in ends if not one.ran), measured) if steps is None else measured
        self._tell(arm, seed, broken, curve, steps)
        if steps is not None and curve[0][1] <= self.problem.target_loss and (reach := self.runs[arm][seed]) is not None:
            self.runs[arm][seed] = dataclasses.replace(reach, most=True)

    def _tell(self, arm: int, seed: int, measured: TrialObservation, curve: Curve, steps: float | None) -> None:
        ended = measured.ran or measured.reason is Reason.NUMERICS
        every = self.problem.arms[arm].config.run.steps
        missed = Reach(every, True, self._step_s(arm, measured, every)) if ended else None
        self.runs[arm][seed] = missed if steps is None else Reach(steps, False, self._step_s(arm, measured, steps))
        self.curves[arm][seed] = curve

    def _step_s(self, arm: int, measured: TrialObservation, steps: float) -> float:
        """Returns the mean seconds of a run's first ``steps`` steps, or over that of all steps where the latter is predicted."""
        one = self.problem.arms[arm]
        if not self.problem.predicts:
            return one.mean_step_s(measured.phases, steps) or measured.seconds
        first, every = (one.mean_step_s(one.phases, count) for count in (steps, one.config.run.steps))
        return first / every if first and every else 1.0

    @property
    def evidence(self) -> Evidence:
        """Returns what the runs so far say."""
        settings = self.problem.config.search
        count = len(self.runs)
        times = self.problem.believed if self.problem.predicts else StepTimes(np.zeros(count), np.zeros((count, count)))
        return Evidence([self._timed(runs) for runs in self.runs], times, settings.seeds, settings.confidence)

    def _timed(self, runs: dict[int, Reach | None]) -> dict[int, Reach | None]:
        """Returns an arm's runs, of which those that broke before their step time was known have that of the others."""
        known = [[run.step_s for run in arm.values() if run and math.isfinite(run.step_s)] for arm in (runs, *self.runs)]
        usual = fmean(next(filter(None, known), [1.0]))
        return {s: run and (run if math.isfinite(run.step_s) else dataclasses.replace(run, step_s=usual)) for s, run in runs.items()}


def fastest_layout(planned: Plan) -> FastestLayout:
    """Returns the fastest layout of a plan that fits. Raises ``ConfigError`` if none does."""
    if not len(planned.order):
        raise ConfigError(
            "no layout is likely to fit into memory on the cluster whose time counts; name a larger one in search.target_cluster"
        )
    return FastestLayout(planned, int(planned.order[0]))
