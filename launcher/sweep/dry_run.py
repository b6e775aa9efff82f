"""``trireme train --dry-run``: print what would be submitted, start nothing, write nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.sweep.run import Point


def print_requests(points: Sequence[Point], mode: str) -> None:
    """The exact script, manifest or command of every point, as its backend renders it; pruned points with their reason.

    ``mode`` is ``client``, or ``server`` for backends that can ask their server whether it would accept the request.
    """
    from pathlib import Path

    from launcher.backends import backend_for
    from launcher.sweep.store import job_of, trial_id

    for point in points:
        if point.config is None:
            print(f"# {' '.join(point.overrides)}: pruned: {point.error}\n")
            continue
        backend = backend_for(point.config.cluster)
        identifier = trial_id(point.config)
        job = job_of(identifier, "dry-run", 0, Path(point.config.sweep.dir) / "trials" / identifier, point.config)
        print(f"# trial {identifier}: {' '.join(point.overrides)}")
        print(backend.render(job).text + "\n")
        if mode == "server" and hasattr(backend, "validate"):
            backend.validate(backend.render(job))
