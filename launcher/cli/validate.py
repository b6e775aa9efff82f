"""``trireme validate CSV``: the cost model against a table of measured runs, the reader's own or published ones."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.console import wide_console
from trainer.config import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from launcher.results.validation import Judged, Summary

HELP = "check the cost model against a table of measurements"

DESCRIPTION = """\
Predicts every row of a table of measured training runs and prints, per source, how far off step time and peak memory are, how well the
layouts of a sweep are ranked, and whether shortages of memory are foreseen. Rows that say too little are counted with the reason.

Columns that a row needs: layers, hidden, seq, gpu, gpus, tp, pp, mbs, gbs. Columns that help: heads, kv_heads, ffn, vocab, arch (gpt, llama,
moe), virtual_pp, cp, ep, sequence_parallel, recompute, zero_stage_or_sharding, precision, interconnect, nodes. What is compared:
step_time_s (or tokens_per_s_per_gpu, samples_per_s), peak_mem_gb (1e9 bytes), oom (yes or no).

example:
  trireme validate measured.csv --out predictions.csv
"""


def main(argv: list[str]) -> int:
    """0 when at least one row could be predicted, 1 when none."""
    arguments = parser().parse_args(argv)
    from launcher.config.hardware import hardware_files
    from launcher.results.published import read
    from launcher.results.validation import by_source, judge, summary, unanswered

    judged = judge(read(arguments.table), hardware_files())
    if arguments.out:
        write(judged, Path(arguments.out))
    sources, everything = by_source(judged), summary(judged)
    selections = {name: summary([j for j in judged if chosen(j)]) for name, chosen in SELECTIONS.items()}
    if arguments.json:
        figures = {name: document(each) for name, each in {"all": everything, **selections}.items()}
        sources_ = {source: document(each) for source, each in sources.items()}
        print(json.dumps({**figures, "sources": sources_, "not predicted": unanswered(judged)}, indent=2, allow_nan=False))
    else:
        show({**sources, "all": everything, **selections}, arguments.sweeps)
        for reason, count in unanswered(judged).most_common():
            print(f"{count} rows not predicted: {reason}")
    return 0 if everything.predicted else 1


SELECTIONS: dict[str, Callable[[Judged], bool]] = {
    "dense rows with full configuration": lambda judged: judged.whole,
    "such rows in 16 bits on V100, A100, H100": lambda judged: judged.comparable,
}
"""Groups of rows that have a line of their own. The second are those that public cost models were scored on."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("trireme validate", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("table", metavar="CSV", help="table of measured runs")
    made.add_argument("--out", metavar="CSV", help="write each row's prediction: row (from 1), step_time_s, peak_mem_gb, oom, reason")
    made.add_argument("--sweeps", action="store_true", help="one line for each sweep too")
    made.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return made


def write(judged: Sequence[Judged], path: Path) -> None:
    """One line per row of the table, predicted or with the reason why not."""
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            lines = csv.writer(file)
            lines.writerow(("row", "step_time_s", "peak_mem_gb", "oom", "reason"))
            for j in judged:
                lines.writerow((j.row.number, *_cells(j), j.reason))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    print(f"wrote {len(judged)} rows to {path}", file=sys.stderr)


def _cells(judged: Judged) -> tuple[str, str, str]:
    answer = judged.answer
    if answer is None:
        return "", "", ""
    return f"{answer.step_time_s:.6g}", f"{answer.reported_bytes / 1e9:.6g}", "yes" if answer.fits < 0.5 else "no"


def document(each: Summary) -> dict[str, Any]:
    """A summary as plain data."""
    found = dataclasses.asdict(each)
    if each.verdicts:
        found["verdicts"] |= {name: getattr(each.verdicts, name) for name in ("precision", "recall", "f1")}
    return found | {"correlation": each.correlation, "regret": each.regret}


def show(summaries: dict[str, Summary], with_sweeps: bool) -> None:
    """The tables for people."""
    console = wide_console()
    console.print(_figures(summaries))
    if with_sweeps:
        console.print(_sweeps(summaries["all"]))


def _figures(summaries: dict[str, Summary]) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("source", max_width=48, no_wrap=True)
    heads = (
        "rows",
        "predicted",
        "times",
        "median",
        "p90",
        "bias",
        "sweeps",
        "rank corr.",
        "regret",
        "OOM precision",
        "recall",
        "F1",
        "AUC",
        "of shares",
        "of shares",
    )
    for head in (*heads, "peaks", "median"):
        made.add_column(head, justify="right")
    for source, each in summaries.items():
        if source == "all":
            made.add_section()
        made.add_row(source, *_line(each))
    return made


def _line(each: Summary) -> list[str]:
    time, memory, flags = each.time, each.memory, each.verdicts
    cells = [str(each.rows), str(each.predicted)]
    cells += [str(time.count), percent(time.median), percent(time.p90), f"{time.bias:.2f}"] if time else ["", "", "", ""]
    cells += [str(len(each.sweeps)), number(each.correlation), percent(each.regret)] if each.sweeps else ["", "", ""]
    shortage = flags is not None and flags.hits + flags.missed > 0
    cells += (
        [percent(flags.precision), percent(flags.recall), number(flags.f1), number(flags.auc), number(flags.auc_of_shares)]
        if flags and shortage
        else [""] * 5
    )
    return cells + ([str(memory.count), percent(memory.median)] if memory else ["", ""])


def _sweeps(everything: Summary) -> Table:
    from rich import box
    from rich.table import Table

    made = Table("sweep", "rows", "rank corr.", "regret", "median error", "bias", box=box.SIMPLE_HEAD, pad_edge=False)
    for sweep in everything.sweeps:
        made.add_row(
            sweep.name,
            str(sweep.count),
            number(sweep.correlation),
            percent(sweep.regret),
            percent(sweep.errors.median),
            f"{sweep.errors.bias:.2f}",
        )
    return made


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
