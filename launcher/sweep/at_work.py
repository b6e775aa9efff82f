"""A command at work on a sweep: known to other commands from its first trial to its end, in the background where that is asked, and with a
notification at its end.

    <root>/at_work           locks, one for each sweep that a command is at work on (launcher.trials.lock)
    <root>/sweeps/NAME.log   what a command in the background says, and said before
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from launcher.console import say
from launcher.interrupt import Interrupted
from launcher.sweep.notify import check_notify, notify
from launcher.tracking.process import nothing_outlives_us
from launcher.trials.lock import Locks
from launcher.trials.store import Record, Store
from trainer.shared.run.errors import ConfigError


class Command:
    """A command that runs a sweep, as an observer of it and as a context: its end notifies, unless it was refused before it began."""

    def __init__(self, root: str | Path, name: str, notify: str | None = None):
        """``notify``: as ``sweep.notify``, checked here."""
        check_notify(notify)
        self._store, self._name, self._notify = Store(root), name, notify
        self._locks: Locks | None = None
        self._begun: Callable[[], None] = lambda: None
        self._since = time.time()

    def detach(self, options: str) -> None:
        """Goes on in the background: only a new process returns from this, and the caller's ends once trials are being submitted.
        ``options``: with which other verbs find the folder. Raises ``ConfigError`` if the sweep is being run, or cannot outlive this
        command."""
        if nothing_outlives_us():
            raise ConfigError("--detach: whatever this command starts ends with it, as the main process of a container; leave --detach out")
        if at_work(self._store, self._name):
            raise ConfigError(f"sweep {self._name} is being run already; 'trireme attach {self._name}{options}' shows it")
        log = log_of(self._store, self._name)
        log.parent.mkdir(parents=True, exist_ok=True)
        attach = f"trireme attach {self._name}{options}"
        self._begun = into_background(log, lambda pid: (
            f"sweep {self._name} runs in the background as process {pid}, which 'kill {pid}' ends; it writes {log}\n"
            f"{attach}    shows it; Ctrl-C leaves it running"
        ))  # fmt: skip

    # -- as an observer -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Others are told; a search comes here with each of its trials."""
        if self._locks is None:
            self._locks = Locks(self._store.root / "at_work")
            self._locks.take(self._name)
            self._begun()

    def on_trial(self, record: Record) -> None:
        """Nothing to do."""

    def on_poll(self, records: Sequence[Record]) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing yet: the command may go on to its next trials."""

    # -- as a context ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Command:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """The command ends, by ``error`` if there is one."""
        if self._locks is None:
            return
        self._locks.close()
        self._locks = None
        if self._notify is not None and (trouble := notify(self._notify, self._store.sweep(self._name), error, time.time() - self._since)):
            say(f"warning: sweep.notify: {trouble}")


def at_work(store: Store, name: str) -> bool:
    """Returns whether a command is at work on the sweep, on any machine that shares the folder's locks. Never asked by that command."""
    with suppress(OSError):
        if (store.root / "at_work").exists():
            locks = Locks(store.root / "at_work")
            try:
                return locks.held(name)
            finally:
                locks.close()
    return False


def log_of(store: Store, name: str) -> Path:
    """Returns the file into which a command in the background writes."""
    return store.sweeps / f"{name}.log"


def into_background(log: Path, words: Callable[[int], str]) -> Callable[[], None]:
    """Forks. The child returns, without a terminal, its output in ``log``, with what it is to call once it has begun. The parent waits for
    that, prints ``words`` with the child's process id, and exits with 0; it exits as the child does, with the child's words, if that ends
    before."""
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("a") as file:
        print(time.strftime("--- %Y-%m-%d %H:%M:%S"), file=file)
    said = log.stat().st_size
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        _follow(child, reading, log, said, words)
    os.close(reading)
    os.setsid()
    _write_into(log)

    def begun() -> None:
        with suppress(OSError):  # its parent has been killed
            os.write(writing, b"!")
        os.close(writing)

    return begun


def _write_into(log: Path) -> None:
    """Lets standard output and error of this process be ``log``, and its standard input nothing."""
    nowhere, file = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND)
    for descriptor, own in ((nowhere, 0), (file, 1), (file, 2)):
        os.dup2(descriptor, own)
    for descriptor in (nowhere, file):
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # somebody has put another stream in its place
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _follow(child: int, reading: int, log: Path, said: int, words: Callable[[int], str]) -> NoReturn:
    """The parent's part of ``into_background``. What is to be done at the exit of a command is the child's to do."""
    code = 0
    try:
        if os.read(reading, 1):
            print(words(child))
        else:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            sys.stderr.write(log.read_bytes()[said:].decode(errors="replace"))
    except Interrupted as request:
        code = request.exit_code
        os.kill(child, signal.SIGTERM)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
