"""A clock that nobody sets, comparable between processes of one machine: the kernel's seconds since the machine was started, sleep
included. Wall clocks are set back and forward while programs run: they date what is written down, and decide nothing.
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def seconds() -> float:
    """Since this machine was started."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))  # the first is Linux's own


def mark() -> str:
    """This moment, for ``age``."""
    return f"{_boot()} {seconds():.3f}"


def age(then: str | None, now: str | None = None) -> float | None:
    """Seconds from the ``mark`` ``then`` to ``now``; None where they are not of one machine and one start of it, or none at all."""
    (boot, _, began), (same, _, ended) = str(then).partition(" "), (now or mark()).partition(" ")
    try:
        return max(0.0, float(ended) - float(began)) if boot and boot == same else None
    except ValueError:
        return None


@cache
def _boot() -> str:
    """Return the kernel's random id of this boot; empty on other systems than Linux, where moments are not compared."""
    return _BOOT.read_text().strip() if _BOOT.exists() else ""
