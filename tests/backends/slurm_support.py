"""What the Slurm tests share: trials whose ranks play or are slow, and sweeps that run beside the test."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.backends.pool import Backends
from launcher.backends.slurm.cluster import SlurmCluster
from launcher.config import resolve
from launcher.config.schema import Config, SweepConfig
from launcher.sweep.run import Point, run_sweep
from launcher.trials.store import Record
from tests import warm
from tests.clusters import shared
from trainer.shared.run.schema import CheckpointConfig, DataConfig, LayoutConfig, ModelConfig, RunConfig

PROJECT = Path(__file__).parents[2]
CLUSTER = SlurmCluster(nodes=1, gpus_per_node=1, gpu_request="none", poll_seconds=0.2, code="image", start_timeout=600, visibility_s=1)


def interpreter(folder: Path, module: str) -> str:
    """An executable for ``cluster.python`` that runs ``module.main`` where the job asks for ``python -u -P -m trainer``."""
    code = f"import sys; from {module} import main; sys.exit(main(sys.argv[1:]))"
    if "slurm" not in shared.GIVEN:
        return warm.python(folder, ["-P", "-c", code], left_out=4)
    path = folder / "python"
    path.write_text(f"#!/bin/sh\nshift 4\nPYTHONPATH={PROJECT} exec {sys.executable} -c '{code}' \"$@\"\n")
    path.chmod(0o755)
    return str(path)


def warmth() -> dict[str, str]:
    """The setting of an interpreter whose ranks are real and have imported everything, on our own cluster."""
    return {} if "slurm" in shared.GIVEN else {"python": warm.python()}


def trial(behaviour: str = "ok", *, seed: int = 1, steps: int = 4, every: int = 0, ranks: int = 1, data: int = 1, **cluster: Any) -> Config:
    """A resolved trial. Played ranks behave as ``tests/sweep/played.py`` says; real ones ignore ``behaviour``."""
    return resolve(
        Config(
            model=ModelConfig(layers=1, hidden=16, heads=2, vocab=64, seq=8),
            layout=LayoutConfig(tensor=ranks, data=data),
            data=DataConfig(kind="synthetic", pattern=behaviour),
            run=RunConfig(
                steps=steps, seed=seed, global_batch=2 * data, timeline=False, device="cpu", checkpoint=CheckpointConfig(every=every)
            ),
            cluster=dataclasses.replace(CLUSTER, **cluster),
        )
    )


def points(*configs: Config) -> list[Point]:
    return [Point((f"run.seed={config.run.seed}",), config) for config in configs]


def run(runs: Path, *configs: Config, name: str = "drill", **settings: Any) -> list[Record]:
    """A sweep from its beginning, or its interruption, to its end."""
    with Backends() as backends:
        return run_sweep(name, points(*configs), SweepConfig(dir=str(runs), **settings), backends)


class Running(threading.Thread):
    """A sweep that runs while the test breaks things."""

    def __init__(self, runs: Path, *configs: Config, **settings: Any):
        super().__init__(daemon=True)
        self.records: list[Record] = []
        self._run = lambda: run(runs, *configs, **settings)
        self.start()

    def run(self) -> None:
        self.records = self._run()

    def ended(self) -> list[Record]:
        self.join(600)
        assert not self.is_alive(), "the sweep goes on"
        return self.records


DYING = """\
import os, signal, sys
from pathlib import Path
from launcher.backends.slurm import submission
from launcher.backends.slurm.cluster import SubmitConfig
from tests.backends.slurm_support import run, trial

moment, runs, python, controller, *options = sys.argv[1:]
where = {"submit": SubmitConfig("login", options)} if options else {}
submit = submission.submit_script

def before(*given):
    os.kill(os.getpid(), signal.SIGKILL)

def after(*given):
    submit(*given)
    os.kill(os.getpid(), signal.SIGKILL)

def during(*given):
    os.kill(int(controller), signal.SIGSTOP)
    return submit(*given)

submission.submit_script = locals()[moment]
run(Path(runs), *(trial(seed=seed, python=python, **where) for seed in (1, 2, 3)))
"""


def dying(moment: str, runs: Path, python: str, controller: int = 0, options: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """A launcher of three trials in a process of its own, which dies before or after it submits, or is stuck at it because the controller
    hangs. With ``options`` of ssh it submits over it."""
    command = [sys.executable, "-c", DYING, moment, str(runs), python, str(controller), *options]
    return subprocess.Popen(command, cwd=PROJECT, stderr=subprocess.DEVNULL)


def squeue(*fields: str) -> list[list[str]]:
    """The queue, ended jobs included, as rows of ``fields``."""
    command = ["squeue", "--noheader", "--array", "--states=all", "--Format=" + ",".join(f"{field}:|" for field in fields)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [[part.strip() for part in line.split("|")[: len(fields)]] for line in text.splitlines()]


def submissions(runs: Path) -> list[str]:
    """Names of the jobs that Slurm was given by the sweeps in ``runs``."""
    ours = {path.name for path in runs.glob("arrays/*")}
    return [name for (name,) in squeue("Name") if name in ours]


PASSED_ON = {
    "acctg-freq", "batch", "bb", "bbf", "begin", "consolidate-segments", "contiguous", "core-spec", "cores-per-socket", "cpu-freq",
    "cpus-per-gpu", "delay-boot", "extra", "extra-node-info", "get-user-env", "gpu-bind", "gpu-freq", "gres", "gres-flags", "hint",
    "ignore-pbs", "input", "licenses", "mcs-label", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nice",
    "oom-kill-step", "power", "prefer", "priority", "profile", "propagate", "quiet", "reboot", "resv-ports",
    "sockets-per-node", "spread-job", "spread-segments", "stepmgr", "thread-spec", "threads-per-core", "tmp", "tres-bind",
    "use-min-nodes", "verbose", "wait-all-nodes", "wckey",
}  # fmt: skip
"""Options of sbatch that say where, when and at whose expense a job runs, and not what it is."""
SRUN_PASSED_ON = PASSED_ON | {
    "account", "array", "bcast", "bcast-exclude", "comment", "compress", "constraint", "dependency", "disable-status", "epilog",
    "exact", "exclusive", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "hold", "job-name", "label", "mail-type",
    "mail-user", "mem", "mpi", "no-container-mount-home", "overlap", "oversubscribe", "partition", "preserve-env", "prolog", "qos", "segment",
    "quit-on-interrupt", "reservation", "send-libs", "slurmd-debug", "switches", "task-epilog", "task-prolog", "threads", "unbuffered",
}  # fmt: skip
"""Options of srun that leave the ranks as they are; many say something of a job, and nothing here, where it has begun."""
