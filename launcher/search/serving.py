"""Searches the front of inference on a cluster: the next candidate, its trial's configuration, the final answer. Pure.

The candidates are the rows of a plan that may be on the front. A trial serves one replica, or as many as the row (``search.nodes``); its
error holds for the row. ``FrontSearch`` picks; then the rows to be recommended are measured, too.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from launcher.config.schema import Config
from launcher.cost.inference import InferenceEstimate
from launcher.cost.parts import total
from launcher.planning.serving.plan import InferencePlan, estimated
from launcher.planning.serving.space import name_of
from launcher.search.front import FrontSearch, behind
from launcher.search.policy import SearchTrial, Stop, TrialObservation, at_most, limit_reached
from trainer.shared.records.outcome import Reason
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import DataConfig, LayoutConfig

HOPELESS = 4.0
"""Standard errors of a prediction by which a row is both slower and dearer than one of the front, from where it is not tried."""


@dataclass(frozen=True)
class ServingProblem:
    """The rows of a plan as candidates, and the trials that stand for them."""

    config: Config
    planned: InferencePlan
    rows: np.ndarray  # of the plan, those that are candidates

    def policy(self) -> ServingPolicy:
        """The search of these candidates, from its beginning."""
        return ServingPolicy(self)

    @cached_property
    def replicas(self) -> np.ndarray:
        """Replicas of each candidate's trial."""
        whole = self.planned.table["replicas"][self.rows]
        return whole if self.config.search.nodes == "full" else np.ones_like(whole)

    @cached_property
    def small(self) -> InferenceEstimate:
        """Returns the trials' predictions."""
        table = self.planned.table[self.rows].copy()
        work = self.config.workload
        share = None if work.rate is None else work.rate * self.replicas / table["replicas"]
        table["replicas"] = self.replicas
        return estimated(dataclasses.replace(self.planned.case, table=table), work, share)

    @cached_property
    def scaled(self) -> np.ndarray:
        """Returns the predicted ratio of each candidate's time to its trial's, whose replicas share fewer cores and less bandwidth."""
        return ~np.isclose(np.asarray(self.planned.estimate.latency)[self.rows], self.small.latency, rtol=1e-6)

    def trial_config(self, trial: SearchTrial) -> Config:
        """The run that measures a candidate."""
        config, row, replicas = self.config, self.planned.table[self.rows[trial.index]], int(self.replicas[trial.index])
        tensor, pipeline, batch = (int(row[name]) for name in ("tensor", "pipeline", "batch"))
        work, ranks = config.workload, tensor * pipeline * replicas
        rate, concurrency = work.rate and work.rate * replicas / int(row["replicas"]), work.concurrency and batch * replicas
        static = None if rate or concurrency else batch
        per_node = min(config.cluster.gpus_per_node, ranks)
        return dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, seq=max(config.model.seq, work.input + work.output)),
            layout=LayoutConfig(tensor=tensor, pipeline=pipeline, data=replicas),
            data=DataConfig(kind="synthetic"),
            run=dataclasses.replace(config.run, task="inference", precision=config.serving.weights, global_batch=replicas),
            workload=dataclasses.replace(work, batch=static, concurrency=concurrency, rate=rate),
            cluster=dataclasses.replace(config.cluster, nodes=-(-ranks // per_node), gpus_per_node=per_node),
        )

    def predicted(self, trial: SearchTrial) -> tuple[np.ndarray, float]:
        """Seconds of a request to its first token and further, and bytes of the fullest rank."""
        e, i = self.small, trial.index
        parts = np.array([e.ttft[i], e.latency[i] - e.ttft[i]])
        return parts, float(np.broadcast_to(total(e.memory), self.rows.shape)[i])

    def interval(self, trial: SearchTrial) -> None:
        """Has no interval to show: requests have no steps."""

    def words(self, trial: SearchTrial) -> list[str]:
        """The overrides that keep the plan to the trial's row."""
        row = self.planned.table[self.rows[trial.index]]
        load = [] if self.config.workload.concurrency or self.config.workload.rate else [f"workload.batch={row['batch']}"]
        return [f"serving.tensor=[{row['tensor']}]", f"serving.pipeline=[{row['pipeline']}]", *load]

    def name(self, index: int) -> str:
        return name_of(self.planned.table[self.rows[index]])


@dataclass
class ServingPolicy:
    """Runs ``FrontSearch`` over the candidates of a problem; holds their measurements."""

    problem: ServingProblem
    seen: dict[int, TrialObservation] = field(default_factory=dict)
    trials: int = 0
    gpu_hours: float = 0.0
    hours: float = 0.0

    def __post_init__(self) -> None:
        planned, rows = self.problem.planned, self.problem.rows
        table, seconds = planned.table[rows], np.asarray(planned.estimate.latency[rows])
        whole = self.problem.config.search.nodes == "full"  # else rows that differ in replicas alone have the same trial
        axes = ("tensor", "pipeline", "replicas", "batch") if whole else ("tensor", "pipeline", "batch")
        place = np.log2(np.stack([table[name] for name in axes], axis=1).astype(float))
        settings = self.problem.config.search
        self.search = FrontSearch(seconds, planned.values["cost"][rows] / seconds, place, planned.case.layout_spread, settings.tolerance)

    def ask(self, count: int = 1) -> list[SearchTrial] | Stop:
        """The candidates to measure now, or the reason to stop."""
        settings = self.problem.config.search
        if limit := limit_reached(settings, self.trials, self.gpu_hours, self.hours):
            return Stop(limit)
        count = at_most(settings, self.trials, count)
        believed, found = dataclasses.replace(self.search, measured=dict(self.search.measured)), list[int]()
        while len(found) < count and (point := believed.ask()) is not None:
            found.append(point)
            believed.tell(point, float(believed.corrected()[0][point]))
        found = found or self._unproven()[:count]
        if not found:
            return Stop("no way of serving that was not measured is expected to be better than the front")
        return [SearchTrial(i, self.problem.config.search.nodes == "full", self._hopeless_above(i)) for i in found]

    def tell(self, trial: SearchTrial, measured: TrialObservation) -> None:
        """Learns from a trial. One that ran out of memory says the same of larger batches of its layout."""
        self.trials, self.gpu_hours, self.hours = self.trials + 1, self.gpu_hours + measured.gpu_hours, self.hours + measured.hours
        self.seen[trial.index] = measured
        if measured.ran:
            small = float(self.problem.small.latency[trial.index])
            self.search.tell(trial.index, measured.seconds * float(self._predicted[trial.index]) / small)
            return
        place = self.search.place
        larger = (place[:, :-1] == place[trial.index, :-1]).all(axis=1) & (place[:, -1] >= place[trial.index, -1])
        for i in np.flatnonzero(larger) if measured.reason is Reason.OUT_OF_MEMORY else [trial.index]:
            self.search.drop(int(i))

    @property
    def ran(self) -> list[int]:
        """Candidates that were measured to the end, fastest first."""
        return sorted((i for i, one in self.seen.items() if one.served), key=lambda i: self.seen[i].seconds)

    @property
    def _predicted(self) -> np.ndarray:
        return np.asarray(self.problem.planned.estimate.latency)[self.problem.rows]

    def plan(self, measured_only: bool) -> InferencePlan:
        """Returns the candidates' plan with corrected times; ``measured_only``: of measured ones. Uncorrected rows would look better."""
        planned, rows = self.problem.planned, self.problem.rows
        first, further, fails = np.ones(len(planned.table)), np.ones(len(planned.table)), np.zeros(len(planned.table), dtype=bool)
        seconds = self.search.corrected()[0]
        fails[rows] = ~np.isfinite(seconds)
        first[rows] = further[rows] = np.where(fails[rows], 1.0, seconds / self._predicted)
        for i in self.ran:
            first[rows[i]], further[rows[i]] = self._ratios(i)
        among = np.isin(np.arange(len(planned.table)), rows[self.ran] if measured_only else rows)
        return planned.corrected(first, further, fails, among)

    def _ratios(self, index: int) -> tuple[float, float]:
        """measured / predicted of a trial: to the first token, and from there to the end."""
        (first, further), one = self.problem.predicted(SearchTrial(index, False, None))[0], self.seen[index]
        began = min(one.served.get("ttft_s", one.seconds), one.seconds)
        return began / first, (one.seconds - began) / further if further else 1.0

    def _unproven(self) -> list[int]:
        """Candidates that would be recommended and were not measured."""
        rows = {int(row): i for i, row in enumerate(self.problem.rows)}
        wanted = dict.fromkeys(row for row in self.plan(measured_only=False).recommended.values() if row is not None)
        return [rows[row] for row in wanted if row in rows and rows[row] not in self.seen]

    def _hopeless_above(self, index: int) -> float | None:
        """Seconds above which a trial's row is beaten by one that was measured, in time and in cost."""
        each = self.search.per_second
        beaten = [max(s, s * each[i] / each[index]) for i, s in self.search.measured.items()]
        ratio = float(self.problem.small.latency[index] / self._predicted[index])
        return min(beaten) * ratio * (1 + self.search.tolerance) if beaten else None


def serving_problem(config: Config, planned: InferencePlan) -> ServingProblem:
    """Returns candidates for rows of ``planned`` that may be on the front or keep the limits best. Raises ``ConfigError``."""
    _check_own(config)
    rows = np.flatnonzero(planned.possible)
    if not len(rows):
        raise ConfigError(f"{planned.hopeless} (trireme plan task=inference says more)")
    seconds, cost, best = planned.values["latency_ms"], planned.values["cost"], planned.front
    beaten = np.minimum(*behind(seconds, cost, best))[rows].max(axis=1)
    hopeful = beaten <= HOPELESS * planned.case.layout_spread
    named = [row for row in planned.recommended.values() if row is not None]
    return ServingProblem(config, planned, rows[hopeful | np.isin(rows, named)])


def _check_own(config: Config) -> None:
    serving, engine = config.serving, config.engine
    if not engine.own:
        raise ConfigError(
            f"engine.name={engine.name} can be predicted but not launched: trials run this project's generator; use engine=trireme, or "
            "'trireme plan task=inference', which prints the engine's command"
        )
    if serving.kv != serving.weights:
        raise ConfigError(
            f"serving.kv={serving.kv} differs from serving.weights={serving.weights}, and trials keep keys and values in the format of the "
            "weights; make them the same"
        )
    if config.run.warmup_steps >= config.run.steps:
        raise ConfigError(f"run.warmup_steps={config.run.warmup_steps} leaves nothing of run.steps={config.run.steps} to measure; lower it")
