"""A run that makes an artifact of a pipeline: its inputs are whole before it begins, and its manifest is written when all else is there.

Nothing of the launcher is needed where it runs. An artifact that is whole already is left as it is: an attempt that was killed between
its last two writes is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from trainer.launch.rank_env import RankEnv
from trainer.shared.corpora.index import TOKENIZER
from trainer.shared.records.artifacts import MANIFEST, METRICS_FILE, ArtifactKind, find_artifact, write_artifact
from trainer.shared.records.named_tokens import GENERATION, named_tokens
from trainer.shared.records.outcome import Status
from trainer.shared.records.stage_run import Finish, StageRun
from trainer.shared.records.trial_files import RESULT, attempt_of, failures_in, number, positive, read_steps, write_outcome
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import look_again, read_json, write_json
from trainer.shared.run.schema import ResolvedTrainConfig
from trainer.shared.run.stages import COMPLETIONS, TRAININGS

FIGURES, CHOICE, REPORT = ".training.json", ".choice.json", ".result.json"
"""How a training went, which was chosen, and what the run was about to say of itself: a rank that dies between the artifact and its result
has it said by the next. Hidden: the digest of an artifact names its weights, not their timings."""
VISIBLE_SECONDS = 30.0
"""How long what another node wrote may stay unseen here (caches of NFS)."""
LOOK_SECONDS = 0.2

Work = Callable[[Finish], Status]
"""The run itself."""


def make(stage: StageRun, work: Work, env: RankEnv, out: Path, attempt: int, warmup: int) -> Status:
    """Make the stage's artifact on every rank of ``env``; the first ``warmup`` steps of a training are not counted in its time.
    ``ConfigError`` if an input is not whole, or for what is wrong with the work."""
    if env.rank != 0:
        if stage.made is not None:
            return Status.DONE
        status = work(lambda result: None)
        _await_rank_0(stage, status, out, attempt)
        return status
    with _alone(Path(stage.folder).parent):
        if stage.made is None:
            for name in stage.sources if stage.verb != "choose" else ():
                _check_input(stage, name)
            _clear(stage)
            if (status := work(lambda result: _finish(stage, result, out, warmup))) is not Status.DONE:
                return status
        if attempt_of(written := read_json(out / RESULT) or {}) < attempt:
            done = written.get("status") == Status.DONE.value
            kept = written if done else read_json(Path(stage.folder) / REPORT) or {"world_size": env.world_size}
            write_outcome(out / RESULT, kept | {"status": Status.DONE.value, "attempt": attempt})
    return Status.DONE


def run_command(stage: StageRun, config: ResolvedTrainConfig, finish: Finish) -> Status:
    """The work of a stage that is one process. ``ConfigError`` with its words when they say that its input is wrong."""
    if stage.verb == "prepare" and not stage.command:
        from trainer.data.prepare import prepare

        prepare(config.data, False)
    elif stage.verb == "choose":
        choose(stage, stage.command[0])
    else:
        module, *arguments = stage.command
        words = _Repeated(sys.stderr)
        with contextlib.redirect_stderr(words):
            code = import_module(module).main(arguments)
        if code:
            said = words.getvalue().strip().splitlines()[-1:]
            raise ConfigError((said[0] if said else f"{module} ended with code {code}").removeprefix("error: "))
    finish({})
    return Status.DONE


def choose(stage: StageRun, best: str) -> None:
    """Make the artifact of the best training: hard links where the file system has them. ``ConfigError`` if none was brought to its end."""
    figures = {
        name: read_json(Path(folder) / FIGURES) or {} for name, folder in stage.sources.items() if not _problem(stage, name, Path(folder))
    }
    ranked = sorted((value, name) for name, known in figures.items() if (value := number(known.get(best))) is not None)
    if not ranked:
        raise ConfigError(f"stage {stage.name} has nothing to choose from: none of {', '.join(stage.sources)} was brought to its end")
    chosen, folder = ranked[0][1], Path(stage.folder)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(stage.sources[chosen], folder, copy_function=_link, ignore=shutil.ignore_patterns(MANIFEST))
    write_json(folder / CHOICE, {"chosen": chosen, "best": best, "figures": figures})
    print(f"{chosen} goes on: {best} {ranked[0][0]:.6g} of {', '.join(f'{value:.6g} ({name})' for value, name in ranked)}")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def figures_of(out: Path, warmup: int) -> dict[str, float | None]:
    """Last loss and median step time of a training, as its result will have them."""
    steps = read_steps(out)
    times = [seconds for line in (steps[warmup:] or steps) if (seconds := positive(line.get("step_time_s")))]
    return {"loss": number(steps[-1].get("loss")) if steps else None, "step_time_s": statistics.median(times) if times else None}


class _Repeated(io.StringIO):
    """Text that is also written where it would have gone."""

    def __init__(self, target: IO[str]):
        super().__init__()
        self._target = target

    def write(self, text: str) -> int:
        self._target.write(text)
        return super().write(text)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no process of an earlier attempt works there any more, where the file system knows locks."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_input(stage: StageRun, name: str) -> None:
    """``ConfigError`` if what the stage takes is not there, not whole, or not what it was when the stage was planned."""
    folder, deadline = Path(stage.sources[name]), time.monotonic() + VISIBLE_SECONDS
    while (problem := _problem(stage, name, folder)) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        look_again(folder)
    if problem:
        raise ConfigError(f"input {name} of stage {stage.name}, {folder}, {problem}")


def _problem(stage: StageRun, name: str, folder: Path) -> str:
    found = find_artifact(folder)
    if found is None:
        return "is not there or not whole; make it again, and share sweep.dir between the nodes"
    identity = found.made_by if name in stage.made_by else found.digest
    return "" if identity == stage.inputs[name] else "is another one than the stage was planned for; repeat the command"


def _clear(stage: StageRun) -> None:
    """Take away what an earlier attempt left; a training continues from its checkpoints."""
    folder = Path(stage.folder)
    (folder / MANIFEST).unlink(missing_ok=True)
    if stage.verb not in TRAININGS:
        shutil.rmtree(folder, ignore_errors=True)
    if stage.verb not in ("prepare", "convert"):  # these make their folder themselves
        folder.mkdir(parents=True, exist_ok=True)


def _finish(stage: StageRun, result: Mapping[str, Any], out: Path, warmup: int) -> None:
    """Add what is made of the run's own files, and declare the artifact whole."""
    folder = Path(stage.folder)
    write_json(folder / REPORT, result)
    if stage.verb in TRAININGS:
        write_json(folder / FIGURES, figures_of(out, warmup))
        words = Path(stage.sources.get("data") or stage.sources["model"])
        shutil.copyfile(words / TOKENIZER, folder / TOKENIZER)
        if named := named_tokens([words]):
            write_json(folder / GENERATION, named)
    if stage.verb == "evaluate":
        write_json(folder / METRICS_FILE, result["evaluation"])
    if stage.verb == "generate":
        write_json(folder / COMPLETIONS, {"completions": result["completions"]})
    write_artifact(folder, ArtifactKind(stage.gives), stage.id, stage.inputs)


def _await_rank_0(stage: StageRun, status: Status, out: Path, attempt: int) -> None:
    """Ranks that leave early would have rank 0 ended while it still reads what it declares whole."""
    while status is Status.DONE and stage.made is None:
        if any(attempt_of(failure) >= attempt for failure in failures_in(out)):
            return
        time.sleep(LOOK_SECONDS)
        look_again(Path(stage.folder))
