"""What the Python of the ranks lacks, read from their logs: it was found by nobody before the job began. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from launcher.backends.slurm.cluster import SlurmCluster

_ABSENT = (
    # what the log says, what that means, what to do: in a container, outside; the first that fits
    (
        r"No module named '?trainer\b",
        "has no trainer",
        "set cluster.code=snapshot, or install Trireme in the image",
        "set cluster.code=snapshot, or install Trireme there",
    ),
    (
        r"ModuleNotFoundError: No module named '(?P<name>[\w.]+)'|: No module named (?P<program>[\w.]+)$",
        "has no package {name}",
        "use an image that has it, or name the interpreter in the image that does with cluster.python",
        "install it there, or name another interpreter with cluster.python",
    ),
    (
        r"^Unknown option: -P",
        "is older than 3.11",
        "use an image with a newer Python, or name one in it with cluster.python",
        "name a newer one with cluster.python",
    ),
    (
        r"exec: \S+: not found|exec: \S+: No such file|cannot execute: required file not found",
        "does not exist there",
        "name one that the image has with cluster.python",
        "name one that the nodes have with cluster.python",
    ),
    (
        r"exec: \S+: Permission denied|cannot execute: Permission denied",
        "cannot be executed there",
        "name another one with cluster.python",
        "name another one with cluster.python",
    ),
)


def absent(lines: Iterable[str], cluster: SlurmCluster) -> str | None:
    """One plain line for the first of ``lines`` that tells why Python could not begin; None if none does.

    ``lines`` are the last ones of the ranks' logs, and those of the job's script: what is logged before may be a warning.
    """
    inside = cluster.in_container
    python = f"{cluster.interpreter} " + (f"of the image {cluster.container.image}" if inside else "of the nodes")
    for line in lines:
        for pattern, meaning, in_image, on_node in _ABSENT:
            if found := re.search(pattern, line.strip()):
                name = next(filter(None, found.groups()), "")
                return f"{python}, in which the ranks run, {meaning.format(name=name)} ({line.strip()}); {in_image if inside else on_node}"
    return None
