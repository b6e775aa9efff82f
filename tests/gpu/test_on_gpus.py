"""What must hold on GPUs; not run where there are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.farm import Farm
from tests.small_runs import ranks, small
from trainer.state.sharding import sums_wide
from trainer.tensor.eight_bits import OLDEST

pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no GPU here")]


def losses(farm: Farm, device: str, precision: str, run: dict[str, Any] | None = None, **layout: Any) -> list[float]:
    config = small(precision=precision, run={"device": device} | (run or {}), **layout)
    return [float(loss) for loss in farm.train(config, ranks(layout)).checked().result["losses"]]


@pytest.mark.parametrize(("precision", "off"), [("fp64", 1e-9), ("fp32", 1e-3), ("bf16", 3e-2)])
def test_a_gpu_trains_the_model_that_a_cpu_trains(farm: Farm, precision: str, off: float) -> None:
    assert losses(farm, "cuda", precision) == pytest.approx(losses(farm, "cpu", "fp64"), rel=off)


@pytest.mark.parametrize("compiled", [False, True])
def test_eight_bit_products_train_beside_16_bits(farm: Farm, compiled: bool) -> None:
    if torch.cuda.get_device_capability() < OLDEST:
        pytest.skip("this GPU has no such products")
    config = small(precision="fp8", run={"device": "cuda", "compile": compiled})
    found = farm.train(config, 1).checked().result["losses"]
    assert found == pytest.approx(losses(farm, "cpu", "fp64"), rel=3e-2)


@pytest.mark.parametrize("layout", [{"data": 2}, {"tensor": 2, "sequence_parallel": True}, {"pipeline": 2, "schedule": "zero_bubble"}])
def test_layouts_agree_over_nccl(farm: Farm, layout: dict[str, Any]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here")
    assert losses(farm, "cuda", "fp64", **layout) == pytest.approx(losses(farm, "cuda", "fp64"), rel=1e-9)


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"tensor": 2, "recompute": "full"}, {"tensor": 4}], ids=str)
@pytest.mark.parametrize(("precision", "off"), [("fp64", 1e-9), ("bf16", 3e-2)])
def test_fused_products_agree_with_collectives_and_products(farm: Farm, layout: dict[str, Any], precision: str, off: float) -> None:
    """Eagerly and in compiled blocks."""
    if torch.cuda.device_count() < layout["tensor"] or not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("too few GPUs here that reach each other's memory")
    plain = losses(farm, "cuda", precision, sequence_parallel=True, **layout)
    for compiled in (False, True):
        run = {"async_tensor": True, "compile": compiled}
        assert losses(farm, "cuda", precision, run, sequence_parallel=True, **layout) == pytest.approx(plain, rel=off)


def test_nvml_knows_the_gpu_of_a_rank(farm: Farm) -> None:
    result = farm.train(small(run={"device": "cuda"}), 1).checked().result
    assert result["gpu_clock_mhz"] > 0 and [gpu["rank"] for gpu in result["gpus"]] == [0]


def test_products_are_added_in_fp32_by_the_device() -> None:
    assert sums_wide(torch.device("cuda", 0), torch.bfloat16)
