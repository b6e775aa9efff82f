"""``python -m trainer CONFIG.yaml [--out DIR] [--attempt N]``, the same command on every rank.

Exit codes: 0 done, 2 wrong configuration, 75 stopped by SIGTERM or SIGUSR2 (to be started again), 1 any other failure;
``failure-<rank>.json`` in the output folder has the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import importlib.util
import os
import sys
from functools import partial
from pathlib import Path

from trainer.launch.failure import record_failure
from trainer.launch.rank_env import RankEnv, discover, prepare_devices
from trainer.measure.forwarder import forwarding
from trainer.shared.records.outcome import Status
from trainer.shared.records.stage_run import Finish, StageRun, load_stage
from trainer.shared.records.trial_files import EXIT_STOPPED
from trainer.shared.run.read import load
from trainer.shared.run.resolved import ResolvedTrainConfig
from trainer.shared.run.rules import resolve


def main(argv: list[str] | None = None) -> int:
    """Train one run to its end; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Train one resolved run on this rank.")
    parser.add_argument("config", type=Path, help="the run, as written by the launcher")
    parser.add_argument("--out", type=Path, help="folder of results (default: the configuration's)")
    parser.add_argument("--attempt", type=int, default=0, help="number of this attempt, from 0")
    arguments = parser.parse_args(argv)
    out = arguments.out or arguments.config.resolve().parent
    env = RankEnv()
    prepare_devices(os.environ)
    try:
        env = discover(os.environ)
        status = _train(arguments.config, env, out, arguments.attempt)
    except Exception as error:
        return record_failure(error, env, out, arguments.attempt)
    return EXIT_STOPPED if status is Status.STOPPED else 0


def preload(compiler: bool | None = None) -> None:
    """Import all that ``main`` imports later, before a fork; the compiler where torch is built for devices whose blocks it compiles, or as
    asked. Another trainer's command needs none of it."""
    if importlib.util.find_spec("torch") is None:
        return
    prepare_devices(os.environ)
    of_backward = "torch.fx.experimental.symbolic_shapes"  # torch imports it at the first backward from a tensor other than a loss
    for name in ("torch", "torch.distributed", of_backward, "numpy", "yaml", "trainer.loop", "trainer.probe"):
        importlib.import_module(name)
    torch = sys.modules["torch"]
    if torch.version.cuda or torch.version.hip if compiler is None else compiler:
        importlib.import_module("torch._inductor.config")


def _train(path: Path, env: RankEnv, out: Path, attempt: int) -> Status:
    stage, config = load_stage(path), resolve(load(path), env.world_size)
    if stage is None or not stage.folder:
        return _run(config, env, out, attempt, stage)
    from trainer.stages.make import make, work_of

    return make(work_of(stage, config), partial(_run, config, env, out, attempt, stage), env, out, attempt)


def _run(
    config: ResolvedTrainConfig, env: RankEnv, out: Path, attempt: int, stage: StageRun | None, finish: Finish = lambda result: None
) -> Status:
    if config.run.task == "probe":
        from trainer.probe import probe

        return probe(config, env, out, attempt)
    if config.run.task in ("evaluate", "generate"):
        return _read(config, env, out, attempt, stage, finish)
    if config.run.task == "inference":
        from trainer.generate.measure import measure

        return measure(config, env, out, attempt)
    if config.command is not None:
        from trainer.observe import observe

        with forwarding(config, env.rank, out):
            return observe(config, env, out, attempt)
    from trainer.loop import train  # torch is imported only for a valid configuration

    with forwarding(config, env.rank, out):
        return train(config, env, out, attempt, finish)


def _read(config: ResolvedTrainConfig, env: RankEnv, out: Path, attempt: int, stage: StageRun | None, finish: Finish) -> Status:
    """Runs a command that only reads a model's weights."""
    if config.run.task == "evaluate":
        from trainer.evaluate import evaluate

        return evaluate(config, env, out, attempt, finish)
    from trainer.generate.job import generate_on_ranks

    return generate_on_ranks(config, env, out, attempt, stage, finish)


if __name__ == "__main__":
    faulthandler.enable()  # a crash of native code says where Python was
    code = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # as forked ranks do: threads of libraries may abort a process that takes itself apart, after all is done
