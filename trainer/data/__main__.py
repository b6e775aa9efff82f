"""``python -m trainer.data CONFIG.yaml``: prepare the corpus of a run. Behind ``trireme prepare``; usable by itself in a container.

With ``--check`` it reads the examples of a run as its ranks will, and makes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from trainer.data.dataset import open_dataset
from trainer.data.prepare import Prepared, prepare
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import load
from trainer.shared.run.schema import DataConfig


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 done, 2 wrong input (one line on stderr), 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m trainer.data", description="Prepare the corpus of a run.")
    parser.add_argument("config", help="the run's configuration (YAML)")
    parser.add_argument("--force", action="store_true", help="prepare again even if the folder is there")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a sentence")
    parser.add_argument("--check", action="store_true", help="prepare nothing: read the run's examples as its ranks will")
    arguments = parser.parse_args(argv)
    try:
        if arguments.check:
            return _check(arguments.config)
        make = _with_progress_bar if sys.stderr.isatty() else prepare
        done = make(load(arguments.config).data, arguments.force)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return ConfigError.exit_code
    except KeyboardInterrupt:
        return 130
    print(json.dumps(asdict(done)) if arguments.json else describe(done))
    return 0


def describe(done: Prepared) -> str:
    """One line for a person, and one more if files were left out."""
    size = f"{done.tokens:,} tokens in {done.documents:,} documents ({done.bytes / 1e6:.1f} MB), vocabulary {done.vocab}"
    lines = [f"{done.path} was prepared before: {size}" if done.reused else f"prepared {done.path}: {size}"]
    if done.skipped:
        lines.append(f"left out {len(done.skipped)} files that are not UTF-8 text, such as {done.skipped[0]}")
    return "\n".join(lines)


def _check(config: str) -> int:
    run = load(config)
    open_dataset(run.data, run.model, run.run.seed)
    return 0


def _with_progress_bar(data: DataConfig, force: bool) -> Prepared:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bars = Progress(*columns, console=Console(stderr=True), transient=True)
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in tasks:
            bars.start()
            tasks[what] = bars.add_task(what)
        bars.update(tasks[what], completed=done, total=total)

    try:
        return prepare(data, force, report)
    finally:
        if tasks:
            bars.stop()


if __name__ == "__main__":
    sys.exit(main())
