"""Devices: every file of conf/hardware can be predicted with."""

from __future__ import annotations

import dataclasses
import math

import pytest

from launcher.config.schema import ClusterConfig
from launcher.cost import predict
from launcher.cost.inputs.device import Device
from launcher.cost.prediction import CostModel
from launcher.tables.canonical import COLUMNS, MeasuredRun, Unanswerable
from launcher.tables.cases import machine_of
from tests.cost.machines import GPT_22B, HARDWARE, cluster, layout, mixed
from trainer.shared.run.errors import ConfigError

DEVICES = sorted(name for name, hardware in HARDWARE.items() if not hardware.host)


@pytest.mark.parametrize("name", DEVICES)
def test_every_hardware_file_predicts_a_step_below_its_peaks(name: str) -> None:
    hardware = HARDWARE[name]
    assert hardware.memory_gb and hardware.units and hardware.memory_bandwidth_gbs and hardware.link_gbs and hardware.network_gbs
    assert all(0.3 * hardware.peak_tflops[p] < rate < hardware.peak_tflops[p] for p, rate in hardware.sustained_tflops.items())
    precision = "bf16" if "bf16" in hardware.peak_tflops else "fp16"
    found = predict(GPT_22B, layout(4, 2, 2, micro_batch=2), mixed(64, precision), cluster(16, name))
    work = 6 * 22e9 * 64 * GPT_22B.seq / 16
    assert math.isfinite(found.memory_bytes) and 0.1 < work / found.step_time_s / (hardware.peak_tflops[precision] * 1e12) < 0.8


def test_no_device_of_its_own_memory_sustains_more_than_its_peak() -> None:
    """A rate in another unit is the usual cause. Of a host both were measured, and noise may turn them round."""
    wrong = dataclasses.replace(HARDWARE["h100"], sustained_tflops={"bf16": 600_000.0})
    with pytest.raises(ConfigError, match=r"sustained_tflops\.bf16=600000 of H100-80GB-SXM is above its peak of 989; .* or leave it out"):
        Device.of(wrong, 8)
    assert Device.of(dataclasses.replace(HARDWARE["h100"], sustained_tflops={"bf16": 989.0}), 8).rate("bf16") == 989e12
    Device.of(dataclasses.replace(HARDWARE["cpu"], peak_tflops={"fp32": 1.0}, sustained_tflops={"fp32": 1.01}), 8)


def test_a_device_without_bf16_computes_it_in_fp32_not_in_fp16() -> None:
    """fp16 has not the range of bf16; 8-bit numbers it holds."""
    volta = Device.of(HARDWARE["v100_32"], 8)
    assert volta.rate("bf16") == volta.rate("fp32") < volta.rate("fp16") == volta.rate("fp8")


def test_what_joins_nodes_is_never_taken_for_links() -> None:
    bare, replace = dataclasses.replace(HARDWARE["h100"], network_gbs=None), dataclasses.replace
    one = ClusterConfig(nodes=1, gpus_per_node=8, hardware=bare)
    for joined in (one, replace(one, nodes=9, hardware=replace(bare, link_domain=72))):
        CostModel(joined)
    for several in (replace(one, nodes=2), replace(one, nodes=10, hardware=replace(bare, link_domain=72))):
        with pytest.raises(ConfigError, match="has no network_gbs, and its links do not join"):
            CostModel(several)
    row = MeasuredRun(1, dict.fromkeys(COLUMNS) | {"hardware": "h100", "gpus_per_node": 8, "gpus": 16})
    with pytest.raises(Unanswerable, match="network_gbs is not known"):
        machine_of(row, {"h100": bare})
    assert machine_of(MeasuredRun(1, dict(row.cells) | {"network_gbs": 25.0}), {"h100": bare}).device.network == 25e9
    assert machine_of(MeasuredRun(1, dict(row.cells) | {"gpus": 8}), {"h100": bare}).device.name == bare.name
