"""The layout that a configuration itself has, such as the published one of a recipe, next to the fastest of the plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launcher.config import Config
from launcher.config.rules import settle
from launcher.cost import predict
from launcher.goals.views import Entry
from launcher.labels import memory, percent
from launcher.planning.layout_names import name_of
from launcher.planning.plan import Plan
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import to_dict
from trainer.shared.run.schema import LayoutConfig


def configured(config: Config, planned: Plan) -> dict[str, Any] | None:
    """Predicts the layout of ``config``, on which a plan does not depend otherwise.

    None if it is the default one, which nobody chose. ``refused`` is the reason why it cannot be laid out on this cluster, or None;
    ``times_fastest`` is its step time over the fastest layout's.
    """
    if config.layout == LayoutConfig():
        return None
    try:
        run = settle(config)
    except ConfigError as error:
        return {"name": name_of(config.layout), "layout": to_dict(config.layout), "refused": str(error)}
    found = predict(run.model, run.layout, run.run, run.cluster, run.trainer, run.tune, run.optimizer)
    return {
        "name": name_of(run.layout),
        "layout": to_dict(run.layout),
        "refused": None,
        "step_time_s": found.step_time_s,
        "interval_s": found.interval_s,
        "mfu": found.mfu,
        "memory_bytes": found.memory_bytes,
        "host_bytes": found.host_bytes,
        "fits": found.fits,
        "times_fastest": float(found.step_time_s / planned.seconds[planned.order[0]]) if len(planned.order) else None,
    }


def shown(own: Entry | None) -> Iterator[str]:
    """Yields the sentence for people, if there is such a layout."""
    if own is None:
        return
    head = f"The layout of the configuration, {own['name']}"
    if own["refused"]:
        yield f"{head}, cannot be predicted here: {own['refused']}"
        return
    times = own["times_fastest"]
    if times is None:
        beside = ""
    elif abs(times - 1) < 0.0005:
        beside = ", as fast as the first"
    else:
        beside = f", {percent(abs(times - 1))} {'slower' if times > 1 else 'faster'} than the first"
    beyond = f" and {memory(own['host_bytes'])} of its host" if own["host_bytes"] else ""
    yield f"{head}: {own['step_time_s']:.4g} s{beside}; {memory(own['memory_bytes'])}{beyond}, fits with {percent(own['fits'], digits=0)}."
