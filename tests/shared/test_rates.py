"""What a step time amounts to, for all ranks and for one."""

from __future__ import annotations

import pytest

from tests.small_runs import small
from trainer.shared.records.summary import rates, tokens_per_step
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import TrainConfig


def test_throughput_is_that_of_all_ranks_and_shares_are_those_of_one() -> None:
    config = resolve(from_dict(TrainConfig, small(steps=2, run={"peak_tflops": 0.5})), 1)
    one, four = rates(config, 0.1, 1, 0.0), rates(config, 0.1, 4, 0.0)
    assert one["tokens_per_s"] == four["tokens_per_s"] == pytest.approx(tokens_per_step(config) / 0.1)
    for name in ("tflops_per_gpu", "mfu", "hfu"):
        whole, part = one[name], four[name]
        assert whole is not None and part == pytest.approx(whole / 4), name
    assert one["mfu"] == pytest.approx((one["tflops_per_gpu"] or 0) / 0.5) == pytest.approx(one["hfu"])
