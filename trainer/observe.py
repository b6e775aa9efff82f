"""A trainer that is not ours: its command is run on this rank, its log read, and the records written that ours writes.

    metrics.jsonl    a line per step, by the rank whose log tells of steps
    result.json      by that rank at the end
    failure-R.json   by a rank whose command failed (``trainer.__main__``)

Needs nothing but the standard library: the command's environment need not hold anything of this project.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import json
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.launch.failure import TrainerFailure
from trainer.launch.rank_env import RankEnv
from trainer.shared.records.environment import environment
from trainer.shared.records.log_reader import COMMON_FAILURES, LogReader, plain
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.records.summary import ends_short, result_of, tokens_per_step
from trainer.shared.records.trial_files import METRICS, RESULT, SERIES, known_reason, write_outcome
from trainer.shared.run import steady
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import finite
from trainer.shared.run.foreign import AT_RUN_TIME, CommandConfig
from trainer.shared.run.resolved import ResolvedTrainConfig

TAIL = 12
"""Last lines of a log that are shown when it cannot be read."""
SHOWN = 300
"""Characters of such a line."""
LONGEST = 1 << 20
"""Bytes of a line that are read as one. What never ends a line is read in pieces of it."""
GRACE_S = 20.0
"""Seconds that a command gets to end after a signal was passed on."""
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_C = ctypes.CDLL(None)  # loaded before a fork: a thread may hold the loader's lock


def observe(config: ResolvedTrainConfig, env: RankEnv, out: Path, attempt: int) -> Status:
    """Run ``config.command`` to its end. Done, or stopped by a signal; anything else is raised (``TrainerFailure``, ``ConfigError``)."""
    command = config.command
    assert command is not None
    if command.starts == "node" and env.local_rank:
        return Status.DONE  # the command of the node's first rank starts its ranks
    folder = write_files(command, out)
    words = filled(command.words, placeholders(env, folder))
    record = Recording(config, out, attempt, env.world_size) if _reports(command, env) else None
    try:
        with running(words, command, env, folder) as process:
            last = Watch(process, config, command, record).follow()
        if not last.stopped:
            _check_end(process.returncode, last, command, record)
    except TrainerFailure as failure:
        failure.reports = record is not None
        raise
    if last.stopped:
        return record.result(Status.STOPPED) if record else Status.STOPPED
    return record.result(Status.DONE) if record else Status.DONE


def _reports(command: CommandConfig, env: RankEnv) -> bool:
    return env.rank == (env.world_size - 1 if command.reports == "last" and command.starts == "rank" else 0)


# -- starting -----------------------------------------------------------------------------------------------------------


def write_files(command: CommandConfig, out: Path) -> Path:
    """The folder with the command's files. Every rank writes the same ones, so that none starts before they are there."""
    folder = out / "command"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in command.files.items():
        path = folder / name
        partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
        partial.write_text(content)
        partial.replace(path)
    return folder


def placeholders(env: RankEnv, folder: Path) -> dict[str, str]:
    """The values of ``AT_RUN_TIME``."""
    values = (sys.executable, folder, env.rank, env.local_rank, *_node(env)[1:], env.address, env.port)
    return dict(zip(AT_RUN_TIME, map(str, values), strict=True))


def _node(env: RankEnv) -> tuple[int, int]:
    """Ranks of this node, and its number; what starts the ranks of a single node need not say."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", env.world_size))
    return ranks, int(os.environ.get("GROUP_RANK", env.rank // max(1, ranks)))


def filled(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """``words`` with ``{name}`` replaced where ``name`` is one of ``values``; other braces stay."""
    return [re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), word) for word in words]


@contextlib.contextmanager
def running(words: Sequence[str], command: CommandConfig, env: RankEnv, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a session of its own, which does not outlive this block, nor this process."""
    torchrun = {
        "RANK": env.rank,
        "WORLD_SIZE": env.world_size,
        "LOCAL_RANK": env.local_rank,
        "LOCAL_WORLD_SIZE": _node(env)[0],
        "GROUP_RANK": _node(env)[1],
        "MASTER_ADDR": env.address,
        "MASTER_PORT": env.port,
    }
    own = {name: str(value) for name, value in torchrun.items()} if command.starts == "rank" else {}
    settings = dict(zip(command.environment, filled(list(command.environment.values()), placeholders(env, folder))))
    environment = {**_without_ours(os.environ), "PYTHONUNBUFFERED": "1", **own, **settings}
    try:
        process = subprocess.Popen(
            words, cwd=command.workdir, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=_die_with_parent,
        )  # fmt: skip
    except OSError as error:
        what = command.workdir if error.filename == command.workdir else words[0]
        raise ConfigError(
            f"trainer.launch.command: {what} cannot be run on {socket.gethostname()} ({error.strerror}); correct it, or install it there"
        ) from None
    try:
        yield process
    finally:
        _end_all(process)


def _without_ours(variables: Mapping[str, str]) -> dict[str, str]:
    """``variables`` without what makes Python find this code: the command may have a ``trainer.py`` or a ``tests`` of its own. An
    installation stays, for it may hold what the command needs."""
    kept = dict(variables)
    code = Path(__file__).parents[1]
    paths = kept.get("PYTHONPATH", "").split(os.pathsep)
    if str(code) in paths and not any(code.glob("*.dist-info")):
        kept["PYTHONPATH"] = os.pathsep.join(path for path in paths if path != str(code))
    if "TRIREME_CODE_DIR" in kept:  # a pod sets it with its own code, where the image might have another
        kept.pop("PYTHONSAFEPATH", None)
    return kept


def _die_with_parent() -> None:
    _C.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """Whatever the command left in its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


# -- reading ------------------------------------------------------------------------------------------------------------


class Watch:
    """Follows the output of one command: shows it, reads it, passes signals on, and ends a command that has fallen silent."""

    def __init__(self, process: subprocess.Popen[bytes], config: ResolvedTrainConfig, command: CommandConfig, record: Recording | None):
        self.process, self.record = process, record
        self.patience_s = config.run.timeout_s
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL)
        self.failure: tuple[Reason, str] | None = None  # the first line that tells why
        self.heard = time.monotonic()  # when it last wrote something
        self.stopped = False
        self.kill_at: float | None = None
        self._why = [
            (known_reason(name), re.compile(text))
            for names in (command.failures, COMMON_FAILURES)
            for name, texts in names.items()
            for text in texts
        ]
        self._success = re.compile(command.success) if command.success else None
        self.succeeded = self._success is None

    def follow(self) -> Watch:
        """Return when the command has ended and all that it wrote has been read."""
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._on_signal)
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a log in ASCII shows what it can
        for line in self._lines():
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
            self._take(plain(line))
        self.process.wait()
        return self

    def _on_signal(self, number: int, _: Any) -> None:
        self.stopped, self.kill_at = True, time.monotonic() + GRACE_S
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM if number == signal.SIGTERM else number)

    def _take(self, line: str) -> None:
        self.tail.append(line[:SHOWN])
        if self._success and self._success.search(line):
            self.succeeded = True
        if self.failure is None:
            reason = next((reason for reason, pattern in self._why if pattern.search(line)), None)
            self.failure = (reason, line.strip()[:SHOWN]) if reason else None
        if self.record:
            self.record.take(line, self.heard)

    def _lines(self) -> Iterator[str]:
        """Lines as they come; a carriage return ends one too (progress bars). Bytes that are not UTF-8 are replaced."""
        assert self.process.stdout is not None
        pipe, rest = self.process.stdout.fileno(), b""
        while True:
            if select.select([pipe], [], [], 0.2)[0]:
                data = os.read(pipe, 1 << 16)
                if not data:
                    break
                self.heard = time.monotonic()
                *lines, rest = re.split(rb"\r\n|\n|\r", rest + data)
                if len(rest) > LONGEST:
                    lines, rest = [*lines, rest], b""
                yield from (line.decode(errors="replace") for line in lines)
            elif self.process.poll() is not None:
                break  # something that it started holds the pipe open
            self._end_if_due()
        if rest:
            yield rest.decode(errors="replace")

    def _end_if_due(self) -> None:
        now = time.monotonic()
        if self.kill_at is not None and now > self.kill_at:
            os.killpg(self.process.pid, signal.SIGKILL)
        if now - self.heard > self.patience_s:
            raise TrainerFailure(
                Reason.COMMUNICATION,
                f"the command wrote nothing for {self.patience_s:g} s and was ended; its last line: {self.last_line()}; "
                f"raise run.timeout_s if it takes that long",
            )

    def last_line(self) -> str:
        return next((line.strip() for line in reversed(self.tail) if line.strip()), "none")


def _check_end(code: int, watch: Watch, command: CommandConfig, record: Recording | None) -> None:
    """``TrainerFailure`` unless the command did its work."""
    if code:
        reason, words = watch.failure or (Reason.ERROR, watch.last_line())
        ended = f"the trainer ended with {f'exit code {code}' if code > 0 else f'signal {signal.Signals(-code).name}'}: {words}"
        if record is None or not (watch.succeeded and record.measured() and (command.success or record.told_last())):
            raise TrainerFailure(reason, ended)
        record.remarks.append(f"after the last step: {ended}")
    if not watch.succeeded:
        raise TrainerFailure(
            Reason.ERROR, f"the log has no line that matches trainer.launch.success={command.success!r}; its last line: {watch.last_line()}"
        )
    if record and record.measured():
        record.remark_on_steps()
    elif record:
        shown = " | ".join(line.strip() for line in watch.tail if line.strip())
        told, run = len(record.steps), record.config.run
        why = (
            "does not fit it, or it ran fewer"
            if told <= run.warmup_steps
            else "reads no time above 0 of a step after the warm-up, or all lines came at once"
        )
        raise TrainerFailure(
            Reason.CONFIGURATION,
            f"the command ended with code 0, but its log tells of {told} steps of {run.steps}; "
            f"trainer.launch.log={command.log} {why}. Its last lines: {shown or 'none'}",
        )


# -- recording ----------------------------------------------------------------------------------------------------------


class Recording:
    """The steps that a log tells of, as ``metrics.jsonl`` and ``result.json``."""

    def __init__(self, config: ResolvedTrainConfig, out: Path, attempt: int, ranks: int):
        assert config.command is not None
        self.config, self.out, self.attempt, self.ranks = config, out, attempt, ranks
        self.reader = LogReader(config.command.log, tokens_per_step(config), config.run.global_batch, ranks)
        self.steps: list[dict[str, Any]] = []
        self.remarks: list[str] = []  # on a run that is done

    def take(self, line: str, now: float) -> None:
        if done := self.reader.take(line, now):
            self._add(done)
        if self.config.run.on_nonfinite == "stop":
            self._check_finite()

    def _check_finite(self) -> None:
        """Raises ``TrainerFailure`` for a step that has diverged. Some print a loss of 0 in place of NaN, but the norm as it is. In fp16
        a norm that is not finite is a step that the loss scale skips."""
        for name, words in (("loss", "loss"), ("grad_norm", "gradient norm")):
            value = self.reader.told.get(name)
            if value is not None and not math.isfinite(value) and (name == "loss" or self.config.run.precision != "fp16"):
                raise TrainerFailure(Reason.NUMERICS, f"the {words} of step {self.reader.told['step']:.0f} is {value}")

    def measured(self) -> bool:
        """True if steps after the warm-up were reported with their times."""
        if done := self.reader.rest():
            self._add(done)
        return bool(self._times())

    def told_last(self) -> bool:
        """True if the last step was reported, by its number. A log that counts from 0 says so with its first."""
        return bool(self.steps) and self.steps[-1]["step"] + (self.steps[0]["step"] == 0) >= self.config.run.steps

    def remark_on_steps(self) -> None:
        """Say so where the trainer made fewer than it was to."""
        numbers, asked = [step["step"] for step in self.steps], self.config.run.steps
        if ends_short(numbers, asked):
            self.remarks.append(f"its log ends at step {numbers[-1]}, and run.steps={asked}")

    def _add(self, step: dict[str, Any]) -> None:
        self.steps.append(step)
        seconds = step["step_time_s"]
        line = {
            "attempt": self.attempt,
            **step,
            "tokens_per_s": tokens_per_step(self.config) / seconds if seconds else None,
            "time": time.time(),
            "clock": steady.mark(),
        }
        with (self.out / METRICS).open("a") as file:
            file.write(json.dumps(finite(line)) + "\n")

    def _times(self) -> dict[int, float]:
        """Seconds of the steps after the warm-up. Logs count steps from 0 or from 1; the first one told is the first."""
        first = self.steps[0]["step"] if self.steps else 0
        told = {s["step"] - first + 1: s["step_time_s"] for s in self.steps if s["step_time_s"] is not None}
        return {step: seconds for step, seconds in told.items() if step > self.config.run.warmup_steps}

    def result(self, status: Status) -> Status:
        """Write ``result.json``; ``status`` again."""
        self.measured()
        series = {many: [step[one] for step in self.steps] for many, one in SERIES.items()}
        peak = self.reader.peak_memory_bytes
        told: dict[str, Any] = {"peak_memory_bytes": peak, "hosts": [socket.gethostname()], "versions": environment()}
        if status is Status.DONE:
            told["message"] = "; ".join(self.remarks)
        write_outcome(self.out / RESULT, result_of(self.config, status, self.attempt, series, self._times(), self.ranks, None) | told)
        return status
