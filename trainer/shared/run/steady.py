"""A clock that nobody sets, comparable between processes of one machine: the kernel's seconds since boot, sleep included. Wall clocks are
set back and forward while programs run: they date records, and decide nothing."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def seconds() -> float:
    """Returns the seconds since this machine was started."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))  # the first is Linux's own


def mark() -> str:
    """Returns this moment, for ``age``."""
    return f"{_boot()} {seconds():.3f}"


def age(then: str | None, now: str | None = None) -> float | None:
    """Returns the seconds from the ``mark`` ``then`` to ``now``; None where a mark is missing or they are not of one boot of one
    machine."""
    (boot, _, began), (same, _, ended) = str(then).partition(" "), (now or mark()).partition(" ")
    try:
        return max(0.0, float(ended) - float(began)) if boot and boot == same else None
    except ValueError:
        return None


@cache
def _boot() -> str:
    """Returns the kernel's random id of this boot; empty on systems other than Linux, where moments are not compared."""
    return _BOOT.read_text().strip() if _BOOT.exists() else ""
