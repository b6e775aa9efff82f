"""What a launcher has submitted when it is killed, the next one finds and follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.backends.pool import Backends
from launcher.config.schema import SweepConfig
from launcher.sweep.run import run_sweep
from launcher.trials.store import Record
from tests.search.planted import PlantedBackend
from tests.sweep.support import points, trial
from trainer.shared.records.outcome import Status

SEEDS = (1, 2, 3, 4)


def run(root: Path, place: PlantedBackend) -> list[Record]:
    settings = SweepConfig(dir=str(root / "runs"), max_parallel=0)
    return run_sweep("sweep", points(*(trial(seed=seed) for seed in SEEDS)), settings, Backends(place))


def test_a_job_without_a_handle_is_adopted_once_and_only_what_was_never_submitted_is_submitted(tmp_path: Path) -> None:
    """The first launcher dies while it submits its second job, before it has written down that of the first."""
    first = PlantedBackend(tmp_path / "place", lambda config: 0.01, dies_after=1)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, first)
    second = PlantedBackend(tmp_path / "place", lambda config: 0.01)
    records = run(tmp_path, second)
    assert [record.status for record in records] == [Status.DONE] * len(SEEDS)
    assert len(first.submitted) == 2 and sorted(first.submitted + second.submitted) == sorted(record.id for record in records)
    assert [record.attempt for record in records] == [0] * len(SEEDS), "no job ran a second time"
    assert all(len(record.history) == 1 for record in records)
