"""Published step times of tuning beside what is predicted of them, their source left out of the fit (minutes).

    python -m benchmarks.tuned_rows RAW.csv

``RAW.csv`` is a table in the form in which it was published. Shown are rows whose model says LoRA, SFT or fine-tuning, then the median
errors of both kinds.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from pathlib import Path

from benchmarks.console import answered
from benchmarks.fit import FitProblem, fit
from benchmarks.history.figures import rows_of
from benchmarks.left_out import Unseen
from launcher.config.hardware import shipped_hardware
from launcher.tables.validation import PredictedRun
from trainer.shared.run.errors import ConfigError

LORA, TUNED = re.compile("lora", re.IGNORECASE), re.compile("lora|sft|finetun", re.IGNORECASE)


def main(argv: list[str] | None = None) -> int:
    """0, or 2 for a table that cannot be read or has no such row."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.tuned_rows", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", metavar="RAW.csv", type=Path)
    given = parser.parse_args(argv)
    try:
        rows = rows_of(given.table)
        if not any(TUNED.search(row["model"] or "") for row in rows):
            raise ConfigError(f"{given.table} has no row whose model says LoRA, SFT or fine-tuning; give a table that has some")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return ConfigError.exit_code
    problem = FitProblem.of_rows(rows)
    judged = Unseen.of(problem, fit(problem)).judge(rows, shipped_hardware())
    tuned = [one for one in judged if one.prediction and one.step_seconds and TUNED.search(one.row["model"] or "")]
    for one in tuned:
        cells = [one.row[name] for name in ("source", "model", "hardware", "precision", "gpus")]
        print(one.row.number, *cells, f"{one.step_seconds:.3f} s, predicted {predicted(one):.3f}: {ratio(one):.3f}", sep=" | ")
    groups = {"LoRA": [one for one in tuned if LORA.search(one.row["model"])], "all weights": [], "both": tuned}
    groups["all weights"] = [one for one in tuned if one not in groups["LoRA"]]
    for name, some in groups.items():
        if some:
            print(f"{name}: {len(some)} rows, median error {statistics.median(abs(ratio(one) - 1) for one in some):.1%}")
    return 0


def predicted(one: PredictedRun) -> float:
    """Seconds of a step."""
    assert one.prediction is not None
    return one.prediction.step_time_s


def ratio(one: PredictedRun) -> float:
    """Predicted over measured step time."""
    assert one.step_seconds
    return predicted(one) / one.step_seconds


if __name__ == "__main__":
    sys.exit(answered(main))
