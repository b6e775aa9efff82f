"""Values that make no sense, or that no loop would finish, are refused where they are read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from launcher.config.schema import ClusterConfig, HardwareConfig
from trainer.shared.run.errors import ConfigError, divisors
from trainer.shared.run.read import from_dict
from trainer.shared.run.schema import LayoutConfig, ModelConfig, RunConfig, ShardingConfig

RATES = ("memory_gb", "legacy_kernel_factor", "exp_throughput", "memory_bandwidth_gbs", "link_gbs", "network_gbs")
MAPS = ("peak_tflops", "sustained_tflops")
COUNTED = [
    *[(ModelConfig, name) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq")],
    *[(ClusterConfig, name) for name in ("nodes", "gpus_per_node")],
    *[(LayoutConfig, name) for name in ("tensor", "pipeline", "virtual_pipeline", "data", "micro_batch", "recompute_every")],
    *[(ShardingConfig, name) for name in ("params", "grads", "optimizer")],
    (RunConfig, "global_batch"),
]


@pytest.mark.parametrize("value", [0, -5, 0.0])
@pytest.mark.parametrize("name", [*RATES, *MAPS])
def test_a_rate_that_is_given_is_above_zero(name: str, value: float) -> None:
    given: Any = {"bf16": value} if name in MAPS else value
    where = f"hardware.{name}.bf16" if name in MAPS else f"hardware.{name}"
    with pytest.raises(ConfigError, match=rf"^{where}={value:g} is not above 0; give a larger number, or leave it out"):
        from_dict(HardwareConfig, {name: given}, "hardware.")


def test_a_rate_that_is_not_known_is_left_out_or_null() -> None:
    names = [name for name in RATES if getattr(HardwareConfig(), name) is None]
    assert from_dict(HardwareConfig, {**dict.fromkeys(names), "peak_tflops": {"bf16": 1}}) == HardwareConfig(peak_tflops={"bf16": 1.0})


def test_a_rate_of_a_precision_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown key hardware.peak_tflops.bf61; did you mean 'bf16'\?"):
        from_dict(HardwareConfig, {"peak_tflops": {"bf61": 1}}, "hardware.")


@pytest.mark.parametrize(("cls", "name"), COUNTED, ids=[f"{cls.__name__}.{name}" for cls, name in COUNTED])
def test_what_is_enumerated_has_a_largest_value(cls: type, name: str) -> None:
    (field,) = [f for f in dataclasses.fields(cls) if f.name == name]
    most = field.metadata["maximum"]
    assert getattr(from_dict(cls, {name: most}), name) == most < 2**31
    with pytest.raises(
        ConfigError, match=rf"x\.{name}=1000000000000000019884624838656 is above the largest allowed value; use {most} or less"
    ):
        from_dict(cls, {name: 1e30}, "x.")


def test_divisors_are_all_and_found_without_counting_up_to_the_number() -> None:
    assert all(divisors(n) == [d for d in range(1, n + 1) if n % d == 0] for n in range(1, 400))
    assert divisors(999_983**2) == [1, 999_983, 999_983**2]


def test_null_is_not_recommended_where_it_was_just_refused() -> None:
    with pytest.raises(ConfigError, match=r"^layout.tensor=null is not a whole number; give a whole number$"):
        from_dict(LayoutConfig, {"tensor": None}, "layout.")
