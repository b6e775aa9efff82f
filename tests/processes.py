"""What tests ask of processes that are not their own children, and launchers that they kill."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

IMPORTED = ["kubernetes.client", "launcher.sweep.run", "launcher.backends.kubernetes.backend", "tests.clusters.kubernetes.fixture"]


def launcher(target: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """A function of a module in a process of its own, forked from one that has imported what launchers on Kubernetes need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter: it was collected while the file was read
        return False
