"""Take the figures of inference, keep them, and write them into the documentation.

    python -m benchmarks.history.inference

Predicts the tables of benchmarks/published/inference_data: static batches by the latency of a batch, served load by the time per token.
Every model weighs the same; left out are models, with constants fitted to the rows of all others. The tables of
benchmarks/published/inference_unseen have no part in any fit: as they are predicted, they are left out. Writes
benchmarks/history/inference/DATE.json and the table of figures in docs/inference.md.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.console import answered
from benchmarks.fit_inference import RequestFit, left_out, without_each
from benchmarks.published.convert import converted
from launcher.config.hardware import shipped_hardware
from launcher.tables.canonical import write
from launcher.tables.inference import RequestSummary, by_model, judge, read, summary

ROOT = Path(__file__).resolve().parents[2]
TABLES = sorted((ROOT / "benchmarks" / "published" / "inference_data").glob("*.csv"))
UNSEEN = sorted((ROOT / "benchmarks" / "published" / "inference_unseen").glob("*.csv"))
FOLDER = Path(__file__).parent / "inference"
PAGE = ROOT / "docs" / "inference.md"
MARKS = ("<!-- figures: python -m benchmarks.history.inference -->\n", "<!-- end of figures -->\n")
Figures = dict[str, Any]


def main() -> int:
    """Take the figures, with models left out."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    record = {"tables": figures(leave_out=True)}
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{datetime.date.today().isoformat()}.json").write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(with_block(PAGE.read_text(), record))
    print(block(record), end="")
    return 0


def figures(leave_out: bool) -> list[Figures]:
    """The figures of each table."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {raw: Path(folder) / raw.name for raw in (*TABLES, *UNSEEN)}
        for raw, path in paths.items():
            write(path, *converted(raw))
        problem = RequestFit.of([str(paths[raw]) for raw in TABLES])
        fits = without_each(problem) if leave_out else {}
        seen = [_figures(raw, paths[raw], problem, fits) for raw in TABLES]
        return seen + [_unseen(_figures(raw, paths[raw], problem, {})) for raw in UNSEEN]


def _unseen(found: Figures) -> Figures:
    return {
        name: each | {"left_out": each["median"]} if isinstance(each, dict) and "median" in each else each for name, each in found.items()
    }


def _figures(raw: Path, path: Path, problem: RequestFit, fits: Mapping[str, Any]) -> Figures:
    judged = judge(read(path), shipped_hardware())
    models = {name: _one(each) for name, each in by_model(judged).items() if each.errors}
    found = {"all": _one(summary(judged)), **models}
    for name, error in (left_out(problem, dict(fits), list(models)) if fits else {}).items():
        found[name]["left_out"] = round(error, 6)
    return {"table": raw.name, "sha256": hashlib.sha256(raw.read_bytes()).hexdigest(), **found}


def _one(found: RequestSummary) -> Figures:
    errors, flags = found.errors, found.verdicts
    times: Figures = {"timed": 0}
    if errors:
        times = {"timed": errors.count, "median": found.median, "row_median": errors.median, "p90": errors.p90, "bias": errors.bias}
        times["inside"] = found.inside
    values = {"rows": found.rows, "predicted": found.predicted, **times, "f1": flags.f1 if flags else None}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}


def newest() -> Figures:
    """The figures taken last."""
    return dict(json.loads(max(FOLDER.glob("20*.json")).read_text()))


def block(record: Mapping[str, Any]) -> str:
    """The figures of a record as the table that the documentation shows."""
    heads = ("table", "model", "timed", "median of models", "of rows", "of models, left out", "p90", "in 90 %", "bias", "F1 of memory")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for table in record["tables"]:
        for model, found in ((name, each) for name, each in table.items() if isinstance(each, dict)):
            f1 = "" if found["f1"] is None else f"{found['f1']:.3f}"
            names = ("median", "row_median", "left_out", "p90", "inside")
            shares = " | ".join(f"{100 * found[name]:.1f} %" if name in found else "" for name in names)
            lines.append(f"| `{table['table']}` | {model} | {found['timed']} | {shares} | {found['bias']:.2f} | {f1} |")
    return "\n".join(lines) + "\n"


def with_block(text: str, record: Mapping[str, Any]) -> str:
    """A document with its table of figures replaced by those of ``record``."""
    before, _, rest = text.partition(MARKS[0])
    return before + MARKS[0] + "\n" + block(record) + "\n" + MARKS[1] + rest.partition(MARKS[1])[2]


if __name__ == "__main__":
    sys.exit(answered(main))
