"""The pipeline step that the cost model expected of a trial, to be drawn under the traced one."""

from __future__ import annotations

from launcher.cost.inputs.case import Case
from launcher.cost.inputs.layouts import to_table
from launcher.cost.prediction import CostModel
from launcher.cost.timeline import MOST_SPANS, timeline
from launcher.results.timeline import Event, Timeline
from launcher.trials.store import Record, recorded_cluster, recorded_run
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import LayoutConfig

KINDS = {"send_forward": "send", "send_backward": "send", "recv_forward": "receive", "recv_backward": "receive"}


def foreseen(record: Record) -> Timeline | None:
    """One row per pipeline rank. None where nothing was predicted, or not any more: rates of the hardware may have gone since."""
    if not record.predicted:
        return None
    try:
        config, cluster = recorded_run(record), recorded_cluster(record)
        case = CostModel(cluster).case(config.model, to_table([config.layout]), config.run, config.tune, config.optimizer)
    except ConfigError:
        return None
    return simulated(case, config.layout)


def simulated(case: Case, layout: LayoutConfig, computations: int | None = None) -> Timeline | None:
    """Returns the pipeline of ``layout``, the single one of ``case``, with about ``computations`` per rank; None where there is none."""
    drawn = timeline(case, layout.stage_layers, computations * layout.pipeline if computations else MOST_SPANS)
    stages = len(drawn.ranks)
    events = tuple(
        Event(rank, span.action.chunk * stages + rank, span.action.chunk, KINDS.get(kind := span.action.kind.value, kind),
              span.action.micro_batch, span.start, span.end)
        for rank, spans in enumerate(drawn.ranks) for span in spans if span.end > span.start
    )  # fmt: skip
    return Timeline(0, layout.schedule, events) if events else None
