"""Collectives by payload, group and place, against bus bandwidths published by stas00/ml-engineering (tests/cost/data/collectives.csv)."""

from __future__ import annotations

import csv
import dataclasses
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.published.interconnect import EFA
from launcher.cost.inputs.constants import SHIPPED
from launcher.cost.inputs.device import Device
from launcher.cost.inputs.groups import PlacedGroup
from launcher.cost.time import collectives
from tests.cost.machines import HARDWARE
from trainer.shared.run.errors import ConfigError

FILES = {"A100": "a100_80", "H200": "h200", "B200": "b200"}
DEVICES = {name: Device.of(HARDWARE[file], 8) for name, file in FILES.items()}


def published() -> list[dict[str, str]]:
    with open(Path(__file__).parent / "data" / "collectives.csv", newline="") as file:
        return list(csv.DictReader(file))


def ratio(row: dict[str, str]) -> float:
    """Predicted over measured time of one published collective."""
    device = DEVICES[row["gpu"][:4]]
    if "Ring" in row["algorithm"] and "LL" not in row["algorithm"]:
        device = dataclasses.replace(device, link_reduction=False)
    size, nodes, payload = int(row["gpus"]), int(row["nodes"]), float(row["payload_bytes"])
    group = PlacedGroup(size, size // nodes, size // nodes)
    reduces = row["collective"] == "all-reduce"
    moved = (2 if reduces else 1) * (size - 1) / size * payload
    predicted = (collectives.all_reduce if reduces else collectives.all_gather)(device, SHIPPED, group, payload)
    return float(predicted) / (moved / (float(row["busbw_gb_s"]) * 1e9))


@given(st.integers(2, 512), st.integers(1, 8), st.floats(3, 9), st.floats(10, 900), st.floats(1, 2))
def test_a_faster_link_never_makes_a_collective_slower(size: int, near: int, digits: float, link: float, faster: float) -> None:
    group = PlacedGroup(size, min(near, size), min(near, size))
    slow, fast = (dataclasses.replace(DEVICES["A100"], link=rate * 1e9) for rate in (link, link * faster))
    for operation in (collectives.all_reduce, collectives.all_gather, collectives.reduce_scatter):
        assert operation(fast, SHIPPED, group, 10**digits) <= operation(slow, SHIPPED, group, 10**digits) * (1 + 1e-9)


def test_published_bus_bandwidths_are_met_from_kilobytes_to_gigabytes() -> None:
    errors = [abs(ratio(row) - 1) for row in published()]
    assert len(errors) > 80
    assert statistics.median(errors) < 0.13
    assert sorted(errors)[int(0.9 * len(errors))] < 0.35


def test_large_payloads_are_met_closely_on_one_node_and_on_four() -> None:
    errors = [abs(ratio(row) - 1) for row in published() if float(row["payload_bytes"]) > 1e9]
    assert len(errors) > 30 and statistics.median(errors) < 0.1 and sorted(errors)[int(0.9 * len(errors))] < 0.2


def over_efa(latency_us: float) -> dict[str, list[float]]:
    """Errors of nccl-tests on 2 to 32 nodes of eight H100 (crazyguitar/aws-gpu-communication-benchmark, data/nccl_*.csv), by collective."""
    device = dataclasses.replace(Device.of(HARDWARE["h100"], 8), network_latency=latency_us * 1e-6)
    found: dict[str, list[float]] = {"all_gather": [], "all_reduce": []}
    for row in csv.DictReader((Path(__file__).parent / "data" / "efa.csv").read_text().splitlines()):
        size, payload = int(row["gpus"]), float(row["mib"]) * 2**20
        seconds = getattr(collectives, row["collective"])(device, SHIPPED, PlacedGroup(size, 8, 8), payload)
        found[row["collective"]].append(abs(float(seconds) / (payload / (float(row["algbw_gb_s"]) * 1e9)) - 1))
    return found


def test_steps_over_efa_are_met_where_latency_is_most_of_them() -> None:
    errors, usual = over_efa(EFA), over_efa(Device.of(HARDWARE["h100"], 8).network_latency * 1e6)
    assert len(errors["all_gather"]) + len(errors["all_reduce"]) == 40
    assert max(map(max, errors.values())) < 1 / 3 < 1 / 2 < max(map(max, usual.values()))
    assert all(statistics.median(found) < 0.21 for found in errors.values()) and statistics.median(usual["all_reduce"]) > 0.4


def test_a_tree_passes_every_rank_of_a_node_and_the_logarithm_of_the_nodes() -> None:
    device = dataclasses.replace(DEVICES["A100"], link_latency=1.0, network_latency=100.0)
    steps = [float(collectives.tree_latency(device, SHIPPED, PlacedGroup(8 * nodes, 8, 8))) - SHIPPED.launch for nodes in (1, 2, 8)]
    assert steps == pytest.approx([3, 14 + 200, 14 + 600])


@given(st.floats(1e3, 1e11), st.integers(1, 64))
def test_a_group_of_one_is_free_and_more_data_takes_longer(payload: float, size: int) -> None:
    device = DEVICES["A100"]
    for collective in (collectives.all_reduce, collectives.all_gather, collectives.all_to_all):
        group = PlacedGroup.of(device, np.array([1, size]), 1)
        alone, several = collective(device, SHIPPED, group, payload)
        assert alone == 0
        assert collective(device, SHIPPED, group, 2 * payload)[1] >= several


def test_every_near_rank_brings_its_own_rail() -> None:
    """Eight replicas per node cross the network with eight ports at once, one replica per node with one."""
    device = DEVICES["A100"]
    spread, packed = PlacedGroup.of(device, 16, 8), PlacedGroup.of(device, 16, 1)
    slow, fast = (float(collectives.bus(device, SHIPPED, group)) for group in (spread, packed))
    assert slow < device.network < fast <= device.link


def test_an_all_reduce_costs_what_its_reduce_scatter_and_all_gather_cost() -> None:
    """But for the way through the network, which is long for few bytes."""
    device = DEVICES["A100"]
    group = PlacedGroup.of(device, 64, 1)
    once, twice = collectives.all_reduce(device, SHIPPED, group, 1e10), 2 * collectives.all_gather(device, SHIPPED, group, 1e10)
    assert float(once) == pytest.approx(float(twice), rel=0.01)


def test_a_gather_waits_for_every_node_and_an_all_reduce_for_the_depth_of_a_tree() -> None:
    """Of nearly nothing, from 16 to 128 nodes: eight times the way, or 7 levels instead of 4."""
    device = DEVICES["A100"]
    groups = [PlacedGroup.of(device, 8 * nodes, 1) for nodes in (16, 128)]
    gather, reduce = (
        [float(of(device, SHIPPED, g, 8.0)) - SHIPPED.launch for g in groups] for of in (collectives.all_gather, collectives.all_reduce)
    )
    assert gather[1] / gather[0] == pytest.approx(8, rel=0.1)
    assert 1 < reduce[1] / reduce[0] < 2 and gather[1] > 10 * reduce[1]


def test_a_switch_that_adds_up_speeds_up_only_all_reduce_inside_its_domain() -> None:
    device = DEVICES["H200"]
    plain = dataclasses.replace(device, link_reduction=False)
    inside, across = PlacedGroup.of(device, 8, 1), PlacedGroup.of(device, 32, 1)
    assert collectives.all_reduce(device, SHIPPED, inside, 1e9) < collectives.all_reduce(plain, SHIPPED, inside, 1e9)
    assert collectives.all_reduce(device, SHIPPED, across, 1e9) == collectives.all_reduce(plain, SHIPPED, across, 1e9)
    assert collectives.all_gather(device, SHIPPED, inside, 1e9) == collectives.all_gather(plain, SHIPPED, inside, 1e9)


def test_a_link_domain_of_72_keeps_a_group_of_64_off_the_network() -> None:
    gb200 = Device.of(HARDWARE["gb200"], 4)
    assert PlacedGroup.of(gb200, 64, 1).far == 1
    assert PlacedGroup.of(Device.of(HARDWARE["h100"], 8), 64, 1).far == 8


@pytest.mark.parametrize("name, per_node, pair", [("v100_16", 4, 1 / 3), ("v100_32", 8, 1 / 6), ("mi300x", 8, 1 / 7), ("a100_80", 8, 1.0)])
def test_without_a_switch_a_pair_has_only_the_links_between_the_two(name: str, per_node: int, pair: float) -> None:
    device = Device.of(HARDWARE[name], per_node)
    assert device.link_of(2) == pytest.approx(pair * device.link) and device.link_of(per_node) == device.link
    rates = [float(collectives.bus(device, SHIPPED, PlacedGroup.of(device, size, 1))) for size in range(2, per_node + 1)]
    assert rates == sorted(rates) and rates[0] == pytest.approx(pair * rates[-1])
    two, all_ = (PlacedGroup.of(device, size, 1) for size in (2, per_node))
    for operation in (collectives.all_reduce, collectives.all_gather, collectives.reduce_scatter):
        slower = operation(device, SHIPPED, two, 1e9) / 0.5 / (operation(device, SHIPPED, all_, 1e9) / (1 - 1 / per_node))
        assert slower == pytest.approx(1 / pair, rel=0.1)
    assert collectives.send(device, SHIPPED, False, 1e9) == pytest.approx(1e9 / (pair * device.link * SHIPPED.link), rel=0.05)


def test_sixteen_devices_behind_a_switch_are_not_those_of_a_mesh() -> None:
    assert Device.of(HARDWARE["v100_32"], 16).link_of(2) == Device.of(HARDWARE["v100_32"], 16).link


@pytest.mark.parametrize("name", ["2", "two of 8", "1 of 8", "8 of 8", "9 of 8", "2 of 8 of 9"])
def test_a_ring_of_another_form_is_one_clear_error(name: str) -> None:
    hardware = dataclasses.replace(HARDWARE["v100_16"], link_ring_gbs={name: 50.0})
    with pytest.raises(ConfigError, match=r"link_ring_gbs has .*name a ring by its devices and those of the larger node, as in '2 of 8'"):
        Device.of(hardware, 8)
