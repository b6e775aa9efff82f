"""Runs planned stages one after another. The folders are the only state: whoever comes after a killed launcher makes what is missing.

    <root>/stages/ID/stage.json   what the stage is and how it stands
    <root>/stages/ID/log          what its program printed
    <root>/stages/ID/artifact/    what it made; whole when it has its manifest
    <root>/stages/ID/lock         held while somebody works there: by the launcher, and by the program that it started even if it is killed

Train and evaluate stages are trials, in a sweep PIPELINE.STAGE: ``trireme status``, ``logs`` and ``cancel`` know them.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from launcher.backends.pool import Backends
from launcher.config import Config, SweepConfig, locate_data
from launcher.stages.plan import PlannedStage
from launcher.sweep.run import run_sweep
from launcher.trials.store import Point, Record
from trainer.spec import ConfigError, Status, save
from trainer.spec.artifacts import CHECKPOINTS, MANIFEST, newest_checkpoint, write_artifact
from trainer.spec.corpus import TOKENIZER
from trainer.spec.files import write_json

METRICS = "metrics.json"


class StageError(RuntimeError):
    """A stage failed. ``str(error)`` is one plain line."""


@dataclass
class Outcome:
    """How a stage came out: done, reused, failed, upstream failed."""

    planned: PlannedStage
    status: str
    detail: str = ""
    seconds: float = 0.0


Tell = Callable[[Outcome], object]


def run_stages(pipeline: str, planned: Sequence[PlannedStage], tell: Tell) -> list[Outcome]:
    """Run ``planned``, in order, but what is there already. What stands behind a stage that failed is not run; all else is."""
    outcomes: dict[str, Outcome] = {}
    for item in planned:
        lost = [name for name in item.stage.needs if name in outcomes and outcomes[name].status in ("failed", "upstream failed")]
        outcome = Outcome(item, "upstream failed", f"stage {lost[0]} failed") if lost else _run(pipeline, item)
        outcomes[item.stage.name] = outcome
        tell(outcome)
    return list(outcomes.values())


def check_inputs_there(planned: Sequence[PlannedStage], chosen: Sequence[PlannedStage]) -> None:
    """``ConfigError`` if a stage that is to be run takes something of one that is not, and that is not there."""
    left_out = {item.stage.name: item for item in planned if item not in chosen}
    for item in chosen:
        for name in item.stage.needs:
            if item.made is None and name in left_out and left_out[name].made is None:
                raise ConfigError(
                    f"stage {item.stage.name} takes what stage {name} makes, which is not there; run it first with --until {name}"
                )


def _run(pipeline: str, item: PlannedStage) -> Outcome:
    start = time.monotonic()
    if item.made is not None:
        return Outcome(item, "reused")
    with _locked(item) as lock:
        if item.made is not None:  # made by whoever held the lock
            return Outcome(item, "reused")
        _note(pipeline, item, "running")
        try:
            _make(pipeline, item, lock)
        except (StageError, ConfigError) as error:
            _note(pipeline, item, "failed", str(error))
            return Outcome(item, "failed", str(error), time.monotonic() - start)
        write_artifact(item.artifact_folder, item.stage.kind.gives, item.id, item.inputs)
        _note(pipeline, item, "done")
    return Outcome(item, "done", seconds=time.monotonic() - start)


@contextmanager
def _locked(item: PlannedStage) -> Iterator[IO[str]]:
    """Nobody else makes the stage meanwhile. The lock belongs to the open file, which the stage's program inherits."""
    item.folder.mkdir(parents=True, exist_ok=True)
    with (item.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def _note(pipeline: str, item: PlannedStage, status: str, detail: str = "") -> None:
    data = {"id": item.id, "pipeline": pipeline, "name": item.stage.name, "stage": item.stage.verb, "status": status, "detail": detail}
    write_json(item.folder / "stage.json", data | {"inputs": item.inputs, "settings": item.settings, "time": time.time()})


def _make(pipeline: str, item: PlannedStage, lock: IO[str]) -> None:
    """Fill the artifact's folder, all but its manifest. ``StageError`` or ``ConfigError`` when that fails."""
    (item.artifact_folder / MANIFEST).unlink(missing_ok=True)
    if item.stage.verb != "train":  # a training continues from its checkpoints
        shutil.rmtree(item.artifact_folder, ignore_errors=True)
    if item.stage.verb in ("train", "evaluate"):
        {"train": _train, "evaluate": _evaluate}[item.stage.verb](pipeline, item)
    else:
        _program(item, lock)


def _train(pipeline: str, item: PlannedStage) -> None:
    checkpoints = item.artifact_folder / CHECKPOINTS
    _trial(pipeline, _placed(item, checkpoints), rerun=newest_checkpoint(checkpoints) is None)
    shutil.copyfile(item.sources["data"] / TOKENIZER, item.artifact_folder / TOKENIZER)


def _evaluate(pipeline: str, item: PlannedStage) -> None:
    record = _trial(pipeline, _placed(item, item.sources["model"] / CHECKPOINTS), rerun=False)
    result = record.read_result() or {}
    write_json(item.artifact_folder / METRICS, result["evaluation"])


def _placed(item: PlannedStage, checkpoints: Path) -> tuple[PlannedStage, Config]:
    """The stage's run with the folders that it works in."""
    assert item.config is not None
    config, settings = item.config, item.config.run.checkpoint
    run = dataclasses.replace(config.run, checkpoint=dataclasses.replace(settings, dir=str(checkpoints)))
    data = dataclasses.replace(config.data, path=str(item.sources["data"]))
    return item, locate_data(dataclasses.replace(config, run=run, data=data))


def _trial(pipeline: str, placed: tuple[PlannedStage, Config], rerun: bool) -> Record:
    """Run a stage's trial to its end, if it is not there."""
    item, config = placed
    settings = SweepConfig(dir=str(item.folder.parent.parent), rerun=rerun, retries=config.sweep.retries)
    with Backends() as backends:
        (record,) = run_sweep(f"{pipeline}.{item.stage.name}", [Point(tuple(item.stage.overrides), config)], settings, backends)
    if record.status is not Status.DONE:
        reason = f"{record.reason.value}: " if record.reason else ""
        raise StageError(f"{reason}{record.detail or record.status.value}; see: trireme logs {record.id}")
    return record


def _program(item: PlannedStage, lock: IO[str]) -> None:
    """Run a stage that is one process; its words go into the stage's log."""
    command = [sys.executable, "-m", *_command(item)]
    with (item.folder / "log").open("w") as log:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, pass_fds=(lock.fileno(),))
    if done.returncode:
        lines = (item.folder / "log").read_text(errors="replace").strip().splitlines()
        raise StageError((lines[-1] if lines else f"exit code {done.returncode}").removeprefix("error: "))


def _command(item: PlannedStage) -> list[str]:
    """The module that does the work of a stage, and its arguments."""
    out, settings = str(item.artifact_folder), item.settings
    if item.stage.verb == "prepare":
        assert item.config is not None
        path = item.folder / "config.yaml"
        save(dataclasses.replace(item.config.train_config(), data=dataclasses.replace(item.config.data, path=out)), path)
        return ["trainer.data", str(path)]
    model = str(item.sources["model"])
    if item.stage.verb == "convert":
        tokenizer = item.sources["model"] / TOKENIZER
        also = ["--tokenizer", str(tokenizer)] if tokenizer.is_file() else []
        return ["trainer.convert", "export", model, out, "--dtype", settings["dtype"], *also]
    words = [word for name, value in settings.items() if name != "prompts" for word in (f"--{name.replace('_', '-')}", json.dumps(value))]
    prompts = [f"--prompt={text}" for text in settings["prompts"]]
    return ["trainer.generate", model, "--out", out, *prompts, *words]
