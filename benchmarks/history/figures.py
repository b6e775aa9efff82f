"""The figures of the cost model on one table: in-sample, and with each source left out of the fit."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.fit import FitProblem, left_out
from benchmarks.published.convert import canonical
from benchmarks.published.raw import read as read_raw
from launcher.config.hardware import shipped_hardware
from launcher.tables.canonical import read, write
from launcher.tables.validation import Summary, by_source, judge, short, summary

FOLDER = Path(__file__).parent
ROWS = {"all": "all rows", "dense": "dense rows with full configuration"}
MARKS = ("<!-- figures: python -m benchmarks.history -->\n", "<!-- end of figures -->\n")
Figures = dict[str, Any]


def figures_of(table: Path, leave_out: bool = False) -> Figures:
    """All figures of a published table; with ``leave_out`` those of sources left out of the fit too, which takes minutes. ``ConfigError`` where it cannot be read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / table.name
        write(path, [canonical(row) for row in read_raw(str(table))])
        judged = judge(read(path), shipped_hardware())
        unseen = left_out(FitProblem.of(str(path))) if leave_out else {}
    sources = {short(name): _figures(found) for name, found in by_source(judged).items() if found.time}
    for name, error in unseen.items():
        sources.setdefault(short(name), {})["median_left_out"] = round(error, 6)
    found = {"all": _figures(summary(judged)), "dense": _figures(summary([one for one in judged if one.whole]))}
    found["all"]["median_left_out"] = sources.pop("all", {}).get("median_left_out")
    return {"table": table.name, "sha256": hashlib.sha256(table.read_bytes()).hexdigest(), **found, "sources": sources}


def _figures(found: Summary) -> Figures:
    """Errors, correlation and areas as fractions; counts as they are."""
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
    return dict(json.loads(max(FOLDER.glob("*.json")).read_text()))


def block(record: Mapping[str, Any]) -> str:
    """The figures of a record as the table that the documentation shows."""
    lines = [
        "| table | rows | timed | median error | p90 | left out | correlation | regret | F1 of memory | peak memory |",
        "|---" * 10 + "|",
    ]
    for table in record["tables"]:
        for key, words in ROWS.items():
            found = table[key]
            if found["timed"]:
                lines.append(
                    f"| `{table['table']}` {table['sha256'][:8]}, {words} | {found['rows']} | {found['timed']} | {_cells(found)} |"
                )
    return "\n".join(lines) + "\n"


def _cells(found: Figures) -> str:
    left = found.get("median_left_out")
    shares = [_percent(found["median"]), _percent(found["p90"]), _percent(left)]
    ranking = ["" if found["correlation"] is None else f"{found['correlation']:.3f}", _percent(found["regret"])]
    return " | ".join([*shares, *ranking, "" if found["f1"] is None else f"{found['f1']:.3f}", _percent(found["memory"])])


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def with_block(text: str, record: Mapping[str, Any]) -> str:
    """A document with its table of figures replaced by those of ``record``."""
    before, _, rest = text.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    return before + MARKS[0] + "\n" + block(record) + "\n" + MARKS[1] + after
