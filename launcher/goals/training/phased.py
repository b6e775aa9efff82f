"""The phases of a run, priced: each with the layout of the whole run and with the fastest of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from launcher.config import Config
from launcher.cost.phases import sized
from launcher.cost.prediction import CostModel
from launcher.goals.views import Entry, GoalColumn, Listing, View
from launcher.labels import amount, duration, percent, plural
from launcher.planning.layout_names import name_of, overrides_of
from launcher.planning.plan import Plan
from trainer.shared.run.phases import PhaseTable
from trainer.shared.run.schema import LayoutConfig

LEAST = 0.01
"""Share of the run's time from which on a change of layouts is worth a sentence with its way: a restart costs some of it."""


def phases(config: Config, layout: LayoutConfig, planned: Callable[[Config], Plan]) -> list[dict[str, Any]]:
    """Returns the phases that the run reaches, with their times under ``layout``, and the fastest layout of each alone as ``planned``
    finds it. Empty for a run without phases."""
    cost, found = CostModel(config.cluster, config.trainer), list[dict[str, Any]]()
    if not config.run.phases:
        return found
    for phase, steps in PhaseTable.of(config.run, config.model.seq).reached(config.run.steps):
        model, run = sized(phase, config.model, config.run)
        own = planned(dataclasses.replace(config, model=model, run=run))
        step = cost.predict(model, layout, run, config.tune, config.optimizer).step_time_s
        best = layout if not len(own.order) or own.seconds[own.order[0]] >= step else own.layout(int(own.order[0]))
        least = min(step, float(own.seconds[own.order[0]])) if len(own.order) else step
        found.append(
            {
                "first_step": phase.first + 1,
                "steps": steps,
                "tokens": steps * phase.global_batch * phase.seq,
                "global_batch": phase.global_batch,
                "seq": phase.seq,
                "step_s": step,
                "seconds": steps * step,
                "fastest": {"name": name_of(best), "overrides": overrides_of(best), "step_s": least, "seconds": steps * least},
            }
        )
    return found


def shown(found: list[Entry], name: str, given: int) -> Iterator[View]:
    """Yields phases for people; ``name``: of the layout of all of them; ``given``: how many ``run.phases`` has."""
    if not found:
        return
    yield Listing(COLUMNS, found)
    if never := given + 1 - len(found):
        yield f"run.steps ends the run before {plural(never, 'phase')} more would begin."
    whole, least = (sum(one["seconds"] for one in entries) for entries in (found, [one["fastest"] for one in found]))
    gain = f"{duration(whole - least)} of {duration(whole)} ({percent((whole - least) / whole)})"
    others = [one for one in found if one["fastest"]["name"] != name]
    if whole - least < LEAST * whole:
        yield f"{name} is for all phases; the fastest layout of each would save {gain}, less than a restart is worth."
        return
    yield (
        f"{name} is for all phases. The fastest layout of each would save {gain}, in {plural(len(others), 'phase')}: end a phase with "
        "run.steps at its last step and optimizer.decay_steps at that of the run, and continue with the other layout and the same "
        "run.checkpoint.dir."
    )


COLUMNS = (
    GoalColumn("from step", "first_step", "{:,}".format),
    GoalColumn("steps", "steps", "{:,}".format),
    GoalColumn("tokens", "tokens", amount),
    GoalColumn("batch", "global_batch", "{:,}".format),
    GoalColumn("sequence", "seq", "{:,}".format),
    GoalColumn("step", "step_s", "{:.4g} s".format),
    GoalColumn("in all", "seconds", duration),
    GoalColumn("its fastest layout", "fastest", lambda best: best["name"], right=False, least=18),
    GoalColumn("step", "fastest", lambda best: f"{best['step_s']:.4g} s", keep=1),
)
