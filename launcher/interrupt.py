"""How a command is asked to end from outside: by Ctrl-C, by SIGTERM, or because its terminal is closed (SIGHUP)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

WORDS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "interrupted by SIGTERM",
    signal.SIGHUP: "interrupted: the terminal was closed (SIGHUP)",
}


class Interrupted(KeyboardInterrupt):
    """The command was asked to end, and does. ``str(error)`` says how it was asked."""

    def __init__(self, number: int):
        super().__init__(WORDS[signal.Signals(number)])
        self.number = number

    @property
    def exit_code(self) -> int:
        """Exit code that a shell shows for a program that this signal ended: 130, 143 or 129."""
        return 128 + self.number


@contextmanager
def asked(handler: Callable[[int, FrameType | None], None]) -> Iterator[dict[signal.Signals, Any]]:
    """While inside, the three signals call ``handler``. Yields what they did before.

    SIGHUP stays ignored where it is, as under nohup. SIGINT does not: shells ignore it for whatever they start in the background,
    and whoever sends it to one process means it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    numbers = [number for number in WORDS if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, handler)
    try:
        yield before
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def leave(number: int, _frame: FrameType | None) -> None:
    """A handler for ``asked``: ends the work at once, by way of every ``finally``."""
    part_from_terminal()
    raise Interrupted(number)


def part_from_terminal() -> None:
    """Where standard output or error were a terminal that is gone, let words to it vanish instead of failing."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
