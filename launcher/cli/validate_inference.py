"""``trireme validate`` on a table of inference: figures by model, every model with the same weight."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launcher.cli.console import wide_console
from launcher.cost.thresholds import FITS
from launcher.labels import percent, plural, shown
from launcher.named_files import write_named
from trainer.shared.run.errors import ConfigError

if TYPE_CHECKING:
    from launcher.tables.inference import JudgedRequest, RequestSummary

OUT = ("row", "latency_ms", "ttft_ms", "tpot_ms", "memory_gb", "oom", "reason")


def validate(path: str, out: str | None, as_json: bool) -> int:
    """0 when at least one row could be predicted, 1 when none."""
    from launcher.config.hardware import hardware_files
    from launcher.tables.inference import by_model, judge, read, summary, unanswered

    rows = read(path)
    if not rows:
        raise ConfigError(f"{path} has a line of column names and no row; add the requests that were measured")
    judged = judge(rows, hardware_files())
    check_units(judged)
    if out is not None:
        write(judged, out)
    found = {**by_model(judged), "all": summary(judged), "rows with full configuration": summary([j for j in judged if j.whole])}
    reasons = unanswered(judged)
    if as_json:
        figures = {name: document(each) for name, each in found.items()}
        print(json.dumps({"models": figures, "not predicted": reasons}, indent=2, allow_nan=False))
    else:
        show({name: each for name, each in found.items() if each.predicted})
        for reason, count in reasons.most_common():
            print(shown(f"{plural(count, 'row')} not predicted: {reason}"))
    return 0 if found["all"].predicted else 1


UNITS = {"latency": ("latency_ms", "milliseconds"), "tpot": ("tpot_ms", "milliseconds"), "token": ("tokens_per_s", "tokens per second")}
"""The column that a row is judged by, and its unit, by ``judged_by``."""


def check_units(judged: Sequence[JudgedRequest]) -> None:
    """``ConfigError`` where a source's measurements are so far from all predictions that they must be in other units."""
    from launcher.tables.inference import judged_by
    from launcher.tables.metrics import Errors

    pairs: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for j in judged:
        if pair := j.pair:
            pairs[j.row["source"] or "(no source)", judged_by(j.row)].append(pair)
    for (source, kind), members in pairs.items():
        errors, (column, unit) = Errors.of(members), UNITS[kind]
        if errors and not 0.01 < errors.bias < 100:
            less = (errors.bias > 1) != (kind == "token")  # a rate is the less the longer a token takes
            factor = f"{max(errors.bias, 1 / errors.bias):.2g} times {'less' if less else 'more'}"
            raise ConfigError(f"{column} of {source} are {factor} than predicted; convert them to {unit}")


def write(judged: Sequence[JudgedRequest], path: str) -> None:
    """One line per row of the table, predicted or with the reason why not."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(OUT)
    lines.writerows((j.row.number, *_cells(j), j.reason) for j in judged)
    write_named(path, text.getvalue(), "--out")
    print(f"wrote {len(judged)} rows to {path}", file=sys.stderr)


def _cells(judged: JudgedRequest) -> list[str]:
    if judged.fits is None:
        return [""] * 5
    times = [f"{1e3 * (value or 0):.6g}" for value in (judged.latency_s, judged.ttft_s, judged.tpot_s)]
    return [*times, f"{(judged.memory_bytes or 0) / 1e9:.6g}", "yes" if judged.fits < FITS else "no"]


def document(each: RequestSummary) -> dict[str, Any]:
    """A summary as plain data."""
    found = dataclasses.asdict(each)
    return found | {"f1": each.verdicts.f1 if each.verdicts else None}


def show(found: dict[str, RequestSummary]) -> None:
    """The table for people."""
    from rich import box
    from rich.table import Table

    made = Table(title="inference", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("model", overflow="fold")
    for head in ("rows", "timed", "median error", "p90", "bias", "out of memory", "F1"):
        made.add_column(head, justify="right", no_wrap=True)
    for name, each in found.items():
        if name == "all":
            made.add_section()
        errors, flags = each.errors, each.verdicts
        times = [str(errors.count), percent(each.median), percent(errors.p90), f"{errors.bias:.2f}"] if errors else [""] * 4
        short = [str(flags.short), "" if flags.f1 is None else f"{flags.f1:.3f}"] if flags else ["", ""]
        made.add_row(name, str(each.rows), *times, *short)
    wide_console().print(made)
