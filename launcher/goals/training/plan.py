"""Predictions of every layout of a model: the fastest, those to measure, and the reasons why the others are out."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from launcher.config import Config
from launcher.cost import Shape
from launcher.cost.phases import mean_tokens
from launcher.cost.thresholds import FITS
from launcher.goals.goal import Wanted
from launcher.goals.training import configured, phased, whole_run
from launcher.goals.training.explain import explained, mostly
from launcher.goals.views import Answer, Entry, GoalColumn, Line, Listing, View
from launcher.labels import amount, interval, memory, percent
from launcher.planning.layout_filter import widen_space
from launcher.planning.layout_names import name_of, overrides_of
from launcher.planning.plan import AT_EDGE, LISTED, Plan, plan, world
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import to_dict


@dataclass(frozen=True)
class TrainingPlan:
    """The layouts of ``config`` with their predictions."""

    config: Config
    planned: Plan
    wanted: Wanted = field(default_factory=dict)

    @property
    def found(self) -> bool:
        return len(self.planned.order) > 0

    def heading(self) -> str:
        config = self.config
        size = amount(float(Shape.of(config.model).parameters)).replace(" G", " B")
        last = amount(config.run.global_batch * config.model.seq)
        batch = f"{config.run.global_batch} sequences ({last} tokens) a step" + " of the last phase" * bool(config.run.phases)
        return f"{config.model.family} {size} parameters, {batch}, {config.run.precision}, {world(config.cluster)}"

    def answer(self, top: int, seconds: float, words: Sequence[str]) -> Answer:
        planned, cluster = self.planned, self.config.cluster
        document = {
            "model": to_dict(self.config.model),
            "parameters": int(Shape.of(self.config.model).parameters),
            "global_batch": self.config.run.global_batch,
            "cluster": {"nodes": cluster.nodes, "gpus_per_node": cluster.gpus_per_node, "hardware": cluster.hardware.name},
            "layouts": self._entries(planned.order[:top]),
            "edge": self._entries(planned.fastest(AT_EDGE)[:top]),
            "configured": configured.configured(self.config, planned),
            "trainer": self.config.trainer.name,
            "phases": self._phases(),
            "run": whole_run.whole_run(self.config, planned) if self.found else None,
            "next": whole_run.next_command(self.config, planned, words) if self.found else None,
            "contenders": whole_run.contenders(planned, words) if self.found else None,
            "considered": len(planned.space.table),
            "in": len(planned.order),
            "out": planned.out,
            "not_predicted": planned.space.dropped,
            "seconds": seconds,
        }
        return Answer(document, self._shown(document, top))

    def explained(self, row: str, picture: Path | None) -> Answer:
        return explained(self.config, self.planned, row, self._entry, self.heading(), picture)

    def measures(self, count: int, overrides: Sequence[str]) -> Answer:
        if not self.found:
            raise ConfigError("--measure: no layout is likely to fit into memory, so there is none to measure; see the plan without it")
        rows, left = self.planned.most_telling(count)
        found = [self._entry(row) | {"spread": spread} for row, spread in zip(rows, left[1:])]
        given = [word for word in overrides if not word.startswith("layout.")]
        known = GoalColumn("all are known to", "spread", lambda spread: f"±{percent(spread, digits=0)}")
        return Answer(
            {"spread": left[0], "measure": found},
            [
                Listing([LAYOUT, STEP, known], found),
                Line(
                    f"What they take says most of the step times of the {min(len(self.planned.order), LISTED):,} fastest layouts, which "
                    f"are known to ±{percent(left[0], digits=0)} before (standard deviation). Train them in one sweep, some steps each, "
                    "and learn from it:"
                ),
                *(Line(f"  trireme train {shlex.join([*given, *one['overrides'], 'sweep.name=measured'])}") for one in found),
                Line("  trireme calibrate measured --out cluster"),
            ],
        )

    @property
    def _tokens(self) -> float:
        """Returns the mean tokens of a step."""
        return mean_tokens(self.config.model, self.config.run)

    def _phases(self) -> list[dict[str, Any]]:
        if not self.found:
            return []
        return phased.phases(self.config, self.planned.layout(int(self.planned.order[0])), lambda config: planned_of(config, self.wanted))

    def _entry(self, row: int) -> dict[str, Any]:
        """Returns one layout and its prediction, part by part."""
        predicted, layout = self.planned.prediction(row), self.planned.layout(row)
        return {
            "name": name_of(layout),
            "layout": to_dict(layout),
            "overrides": overrides_of(layout, self.config.layout),
            "step_time_s": predicted.step_time_s,
            "interval_s": predicted.interval_s,
            "fastest": float(self.planned.chances[row]),
            "mfu": predicted.mfu,
            "memory_bytes": predicted.memory_bytes,
            "fits": predicted.fits,
            "time": predicted.time,
            "memory": predicted.memory,
            "host_bytes": predicted.host_bytes,
            "host": predicted.host,
        }

    def _entries(self, rows: np.ndarray) -> list[dict[str, Any]]:
        return [self._entry(int(row)) for row in rows]

    def _shown(self, document: Entry, top: int) -> Iterator[View]:
        planned, columns = self.planned, columns_of(self._tokens, bool(self.planned.space.table["offload"].any()))
        if self.found:
            yield Listing(columns, document["layouts"])
        else:
            size = self.config.cluster.hardware.memory_gb
            room = "memory" if size is None else f"the {size:g} GB of a device"
            yield (
                f"no layout is likely to fit into {room}; more devices, a smaller model or more recomputation would help, or optimizer "
                "states in host memory (search.space.offload=[0,1])"
            )
        best = planned.seconds[planned.order[0]] if self.found else float("inf")
        edge = planned.fastest(AT_EDGE)
        if len(edge := edge[planned.seconds[edge] < best][: max(3, top // 3)]):
            yield f"Faster if they fit (probability below {percent(FITS, digits=0)}):"
            yield Listing(columns, self._entries(edge))
        yield from configured.shown(document["configured"])
        counts = (
            (f"{document['considered']:,} layouts predicted, {document['in']:,} are in ({document['seconds']:.2f} s). Out:", planned.out),
            ("Not predicted, since they break a rule, repeat another layout or were not asked for:", planned.space.dropped),
        )
        for title, reasons in counts:
            yield from [title, *(f"  {count:>10,}  {reason}" for reason, count in reasons.items())] if reasons else ()
        if self.found:
            yield from phased.shown(document["phases"], document["layouts"][0]["name"], len(self.config.run.phases))
            yield from whole_run.shown(document)


LAYOUT, STEP = GoalColumn("layout", "name", least=18, right=False), GoalColumn("step", "step_time_s", "{:.4g} s".format)


def columns_of(tokens: float, offloads: bool = False) -> Sequence[GoalColumn]:
    """Returns the columns of predicted layouts whose mean step has that many tokens; host memory where some has states there."""
    return (
        LAYOUT,
        STEP,
        GoalColumn("80 %", "interval_s", interval, keep=1),
        GoalColumn("fastest", "fastest", percent, keep=1),
        GoalColumn("tokens/s", "step_time_s", lambda seconds: amount(tokens / seconds), keep=4),
        GoalColumn("MFU", "mfu", percent, keep=4),
        GoalColumn("memory", "memory_bytes", memory, keep=2),
        *([GoalColumn("on the host", "host_bytes", memory, keep=2)] if offloads else ()),
        GoalColumn("fits", "fits", lambda share: percent(share, digits=0), keep=2),
        GoalColumn("mostly", "", mostly, keep=5, right=False),
    )


def plan_training(config: Config, wanted: Wanted) -> TrainingPlan:
    """Returns the plan of ``config`` among layouts that have the values ``wanted``."""
    return TrainingPlan(config, planned_of(config, wanted), wanted)


def planned_of(config: Config, wanted: Wanted) -> Plan:
    """Returns the layouts of ``config`` that have the values ``wanted``, predicted."""
    return plan(config, widen_space(dict(wanted), config.search.space), wanted)
