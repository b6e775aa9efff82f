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
    from launcher.backends import backend_for
    from launcher.trials.identity import trial_id
    from launcher.trials.job import Job
    from launcher.trials.store import Store
    from trainer.spec import to_dict, world_size_of
    from trainer.spec.grid import Grid

    for point in points:
        if point.config is None:
            print(f"# {' '.join(point.overrides)}: pruned: {point.error}\n")
            continue
        config = point.config
        backend = backend_for(config.cluster)
        identifier = trial_id(config)
        directory = Store(config.sweep.dir).trials / identifier
        name = config.sweep.name or "dry-run"
        ranks = world_size_of(config.layout)
        job = Job(identifier, name, 0, directory, config.cluster, ranks, config.sweep.max_parallel or 0, to_dict(config.train_config()))
        print(f"# trial {identifier}: {' '.join(point.overrides)}")
        print("\n".join(f"# {line}" for line in Grid.of(config.layout).picture(config.cluster.gpus_per_node).splitlines()))
        print(backend.render(job).text + "\n")
        if mode == "server" and hasattr(backend, "validate"):
            backend.validate(backend.render(job))
