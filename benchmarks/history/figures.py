"""The figures of the cost model on one table: in-sample, and with each source left out of the fit."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fit import FitProblem, fit
from benchmarks.left_out import Each, Unseen, after_chosen, after_runs
from benchmarks.published.convert import canonical
from benchmarks.published.raw import read as read_raw
from launcher.config.hardware import shipped_hardware
from launcher.tables.canonical import MeasuredRun, read, write
from launcher.tables.validation import PredictedRun, judge, short, summary

FOLDER = Path(__file__).parent
ROWS = {"all": "all rows", "dense": "dense rows with full configuration"}
ERRORS = ["table", "timed", "median error", "in sample", "p90", "in sample", "bias", "correlation", "regret"]
ERRORS += ["F1 of memory", "AUC of shares", "peak memory"]
PAGE = FOLDER.parent.parent / "docs" / "figures.md"
MARKS = ("<!-- figures: python -m benchmarks.history -->\n", "<!-- end of figures -->\n")
GIVEN = {
    "after_1": "one run",
    "after_3": "three",
    "chosen_1": "one chosen",
    "chosen_3": "three chosen",
    "chosen_1_each_machine": "one of each machine",
    "chosen_3_each_machine": "three of each",
    "chosen_1_each_size": "one of each size",
}
"""Runs of a source that are given, in words: random ones, and those that tell most of the others."""
EACH: dict[Each, tuple[int, ...]] = {"machine": (1, 3), "size": (1,)}
"""So many runs are given also of each machine with a trainer, of which a source may have several, and of each number of devices."""
Figures = dict[str, Any]


def rows_of(table: Path) -> list[MeasuredRun]:
    """A published table in canonical form. ``ConfigError`` where it cannot be read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / table.name
        write(path, [canonical(row) for row in read_raw(str(table))])
        return read(path)


def unseen_by(tables: Sequence[Path]) -> Unseen:
    """What each source is predicted with when it is left out: fits to the other sources of the table that has most of them."""
    rows = max((rows_of(table) for table in tables), key=lambda rows: len({row["source"] for row in rows}))
    problem = FitProblem.of_rows(rows)
    return Unseen.of(problem, fit(problem))


def figures_of(table: Path, unseen: Unseen | None = None) -> Figures:
    """All figures of a published table; with ``unseen`` (``unseen_by``) those of sources left out of the fit too. ``ConfigError`` where it
    cannot be read."""
    rows = rows_of(table)
    found = _selections(judge(rows, shipped_hardware()), _figures)
    if unseen:
        more = _selections(unseen.judge(rows, shipped_hardware()), _left_out)
        for name, figures in more.items():
            found[name]["left_out"] = figures
    selections = {name: found.pop(name) for name in ROWS}
    return {"table": table.name, "sha256": hashlib.sha256(table.read_bytes()).hexdigest(), **selections, "sources": found}


def _selections(judged: Sequence[PredictedRun], figures: Callable[[Sequence[PredictedRun]], Figures]) -> dict[str, Figures]:
    """Figures of all rows, of the dense ones, and of each source with step times."""
    sources: dict[str, list[PredictedRun]] = defaultdict(list)
    for one in judged:
        sources[short(one.row["source"])].append(one)
    timed = {name: members for name, members in sources.items() if any(one.prediction and one.step_seconds for one in members)}
    chosen: dict[str, Sequence[PredictedRun]] = {"all": judged, "dense": [one for one in judged if one.whole], **timed}
    return {name: figures(members) for name, members in chosen.items()}


def _left_out(judged: Sequence[PredictedRun]) -> Figures:
    """Figures of rows whose source was left out, and what a few of its runs make of them."""
    calibrated = {f"after_{count}": after_runs(judged, count) for count in (1, 3)}
    calibrated |= {f"chosen_{count}": after_chosen(judged, count) for count in (1, 3)}
    for each, counts in EACH.items():
        calibrated |= {f"after_{count}_each_{each}": after_runs(judged, count, each) for count in counts}
        calibrated |= {f"chosen_{count}_each_{each}": after_chosen(judged, count, each) for count in counts}
    return _figures(judged) | {name: None if value is None else round(value, 6) for name, value in calibrated.items()}


def _figures(judged: Sequence[PredictedRun]) -> Figures:
    """Errors, correlation and areas as fractions; counts as they are."""
    found = summary(judged)
    verdicts = dataclasses.asdict(found.verdicts) | {"f1": found.verdicts.f1} if found.verdicts else {}
    values = {
        "rows": found.rows,
        "predicted": found.predicted,
        "timed": found.time.count if found.time else 0,
        "median": found.time.median if found.time else None,
        "p90": found.time.p90 if found.time else None,
        "bias": found.time.bias if found.time else None,
        "sweeps": len(found.sweeps),
        "correlation": found.correlation,
        "regret": found.regret,
        "f1": verdicts.get("f1"),
        "auc_bytes": verdicts.get("auc"),
        "auc_shares": verdicts.get("auc_of_shares"),
        "memory": found.memory.median if found.memory else None,
    }
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}


def newest() -> Figures:
    """The figures taken last."""
    return dict(json.loads(max(FOLDER.glob("20*.json")).read_text()))


def block(record: Mapping[str, Any]) -> str:
    """Writes the figures of a record as the documentation shows them: the errors, then the errors after some measured runs."""
    shown = [found for table in record["tables"] for found in _shown(table) if found[1]["timed"]]
    errors = [[name, str(found["timed"]), *_errors(found)] for name, found in shown]
    given = [[name, *(_percent(found["left_out"].get(key)) for key in ("median", *GIVEN))] for name, found in shown if "left_out" in found]
    return _table(ERRORS, errors) + "\n" + _table(["table", "none", *GIVEN.values()], given)


def _shown(table: Mapping[str, Any]) -> Iterator[tuple[str, Figures]]:
    """Yields the rows that a table has: all its runs, and those of dense models where these are not all."""
    name = f"`{table['table']}` {table['sha256'][:8]}"
    yield name, table["all"]
    if table["dense"]["timed"] != table["all"]["timed"]:
        yield f"{name}, {ROWS['dense']}", table["dense"]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Writes a table of the documentation."""
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]]) + "\n"


def sources_block(record: Mapping[str, Any]) -> str:
    """The figures of each source, left out and in sample, for the terminal."""
    lines = [f"timed  left out  in sample  bias  {'  '.join(GIVEN.values())}  source"]
    for table in record["tables"]:
        lines.append(f"{table['table']} {table['sha256'][:8]}")
        for name, found in table["sources"].items():
            left = found.get("left_out", dict.fromkeys((*found, *GIVEN)))
            bias = "" if left["bias"] is None else f"{left['bias']:.2f}"
            cells = [_percent(value) for value in (left["median"], found["median"])]
            given = "  ".join(f"{_percent(left.get(key)):>{len(words)}s}" for key, words in GIVEN.items())
            lines.append(f"{found['timed']:5d}  {cells[0]:>8s}  {cells[1]:>9s}  {bias:>4s}  {given}  {name}")
    return "\n".join(lines) + "\n"


def _errors(found: Figures) -> list[str]:
    """Writes the cells of ``ERRORS`` from the third on: left out of the fit, where the source was, except for those in sample."""
    left = found.get("left_out")
    best = left or found
    errors = [_percent(fit[key] if fit else None) for key in ("median", "p90") for fit in (left, found)]
    ranking = ["" if best[key] is None else f"{best[key]:.{digits}f}" for key, digits in (("bias", 2), ("correlation", 3))]
    memory = ["" if best[key] is None else f"{best[key]:.3f}" for key in ("f1", "auc_shares")]
    return [*errors, *ranking, _percent(best["regret"]), *memory, _percent(best["memory"])]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def with_block(text: str, record: Mapping[str, Any]) -> str:
    """Replaces the tables of figures in a document by those of ``record``."""
    before, _, rest = text.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    return before + MARKS[0] + "\n" + block(record) + "\n" + MARKS[1] + after
