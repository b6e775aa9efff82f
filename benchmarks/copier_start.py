"""Processor seconds that a copier takes until a sweep's first run is in MLflow.

    python -m benchmarks.copier_start [--repeats 5] [--other CHECKOUT]

A whole process is measured, its children too: its start, the import of MLflow, the database, one trial of one step, its end. Printed are
the median and the range of ``--repeats`` runs: with nothing cached; in a new folder; in a folder with a database; and where the launcher
ends while its copier starts, after a sweep of one second. With ``--other``, another checkout is measured in turns with this one.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

SWEEP = """
import sys
from dataclasses import replace
from pathlib import Path
from launcher.config import Config, HardwareConfig, resolve
from launcher.tracking import unmirrored
from launcher.trials.store import Point, Store
from trainer.shared.records.outcome import Status
from trainer.shared.run.schema import ModelConfig
root = Path(sys.argv[1])
store, given = Store(root), Config(model=ModelConfig(layers=2, hidden=32, heads=2, vocab=64, seq=16))
hardware = HardwareConfig("any", peak_tflops={"fp32": 0.1}, memory_bandwidth_gbs=20.0, link_gbs=5.0, network_gbs=1.0)
record = store.plan(Point((), resolve(replace(given, cluster=replace(given.cluster, hardware=hardware)))), "one")
record.status, record.started, record.ended = Status.DONE, 1.7e9, 1.7e9 + 1
(record.directory / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "time": 1.7e9}' + chr(10))
(record.directory / "result.json").write_text('{"status": "done", "step_time_s": 0.1}')
store.save(record)
store.write_sweep("one", [record], "benchmark")
unmirrored.add(root, "one")
"""
"""A sweep of one trial that is done, as its files have it."""


class Folder:
    """Folders of trials, and what copiers of one checkout take in them."""

    def __init__(self, checkout: Path, scratch: Path):
        self._checkout, self._scratch = checkout, scratch
        self._env = os.environ | {"PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(scratch / "cache")}

    def nothing_cached(self) -> float:
        shutil.rmtree(self._scratch / "cache", ignore_errors=True)
        return self.new_folder()

    def new_folder(self) -> float:
        return self._copy(self._new())

    def with_database(self) -> float:
        """The database has the runs of another folder."""
        root = self._new()
        shutil.copy(self._scratch / "mlflow.db", root)
        return self._copy(root)

    def one_second(self) -> float:
        """The launcher ends one second after the copier has begun."""
        return self._copy(self._new(), 1.0)

    def _new(self) -> Path:
        root = Path(tempfile.mkdtemp(dir=self._scratch))
        subprocess.run([sys.executable, "-c", SWEEP, str(root)], env=self._env, cwd=self._scratch, check=True)
        return root

    def _copy(self, root: Path, launcher_s: float = 0.0) -> float:
        before, command = _spent(), [sys.executable, "-P", "-m", "launcher.tracking.copier", "--dir", str(root)]
        with (root / "log").open("w") as log:
            copier = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=log, stdout=log, env=self._env, cwd=root)
            time.sleep(launcher_s)
            copier.communicate()
        spent = _spent() - before
        with closing(sqlite3.connect(root / "mlflow.db")) as database:
            finished = database.execute("SELECT count(*) FROM runs WHERE status = 'FINISHED'").fetchone()[0]
        assert copier.returncode == 0 and finished >= 2, (root / "log").read_text()
        shutil.copy(root / "mlflow.db", self._scratch)
        return spent


def _spent() -> float:
    """Processor seconds of all children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


CASES: dict[str, Callable[[Folder], float]] = {
    "nothing cached": Folder.nothing_cached,
    "new folder": Folder.new_folder,
    "with a database": Folder.with_database,
    "launcher of one second": Folder.one_second,
}


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.copier_start", description="Processor seconds of a copier's start.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--other", type=Path, help="another checkout, measured in turns with this one")
    given = parser.parse_args()
    checkouts = [Path(__file__).parents[1], *([given.other.absolute()] if given.other else [])]
    with tempfile.TemporaryDirectory(prefix="trireme-copier-") as scratch:
        folders = {checkout: Folder(checkout, Path(scratch) / str(number)) for number, checkout in enumerate(checkouts)}
        for number in range(len(checkouts)):
            (Path(scratch) / str(number)).mkdir()
        for case, measure in CASES.items():
            taken: dict[Path, list[float]] = {checkout: [] for checkout in checkouts}
            for _ in range(given.repeats):
                for checkout, folder in folders.items():
                    taken[checkout].append(measure(folder))
            for checkout, times in taken.items():
                print(f"{case:24} {statistics.median(times):5.2f} s ({min(times):.2f} to {max(times):.2f})  {checkout.name}", flush=True)


if __name__ == "__main__":
    main()
