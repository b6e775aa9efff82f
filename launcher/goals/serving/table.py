"""A table of measured inference: figures by model, every model with the same weight."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.config.hardware import hardware_files
from launcher.config.trainer import TrainerProfile
from launcher.cost.thresholds import FITS
from launcher.goals.goal import GoalTable
from launcher.goals.views import Answer, Grid, View, not_predicted
from launcher.labels import percent
from launcher.tables.inference import JudgedRequest, RequestSummary, by_model, check_units, judge, read, summary

COLUMNS = ("row", "latency_ms", "ttft_ms", "tpot_ms", "memory_gb", "oom", "reason")
HEADS = ("model", "rows", "timed", "median of models", "median of rows", "p90", "bias", "in 90 %", "out of memory", "F1")


def serving_table(path: str, trainer: TrainerProfile | None, with_sweeps: bool) -> GoalTable:
    """Reads a table and judges its rows, each with its engine."""
    judged = judge(read(path), hardware_files())
    check_units(judged)
    whole = summary([j for j in judged if j.whole])
    found = {**by_model(judged), "all": summary(judged), "rows with full configuration": whole}
    missing = Counter(j.reason for j in judged if j.reason)
    document = {"models": {name: _document(each) for name, each in found.items()}, "not predicted": missing}
    lines = [(j.row.number, *_cells(j), j.reason) for j in judged]
    return GoalTable(lines, found["all"].predicted, Answer(document, _shown(found, missing)))


def _shown(found: Mapping[str, RequestSummary], missing: Counter[str]) -> Iterator[View]:
    rows: list[Sequence[str] | None] = []
    for name, each in found.items():
        if each.predicted:
            rows += [None] if name == "all" else []
            errors, flags = each.errors, each.verdicts
            times = [""] * 6
            if errors:
                medians = percent(each.median), percent(errors.median)
                times = [str(errors.count), *medians, percent(errors.p90), f"{errors.bias:.2f}", percent(each.inside)]
            short = [str(flags.short), "" if flags.f1 is None else f"{flags.f1:.3f}"] if flags else ["", ""]
            rows.append((name, str(each.rows), *times, *short))
    yield Grid(HEADS, rows, "inference", figures=True, compact=True, widest=24)
    yield from not_predicted(missing)


def _cells(judged: JudgedRequest) -> list[str]:
    if judged.fits is None:
        return [""] * 5
    times = [f"{1e3 * (value or 0):.6g}" for value in (judged.latency_s, judged.ttft_s, judged.tpot_s)]
    return [*times, f"{(judged.memory_bytes or 0) / 1e9:.6g}", "yes" if judged.fits < FITS else "no"]


def _document(each: RequestSummary) -> dict[str, Any]:
    return dataclasses.asdict(each) | {"f1": each.verdicts.f1 if each.verdicts else None}
