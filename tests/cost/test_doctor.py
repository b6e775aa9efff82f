"""``trireme doctor``: what was measured is what the cost model then predicts; ranks take turns on cores; nothing is left behind."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.backends.local import fork_server
from launcher.cli import doctor
from launcher.cli.main import main
from launcher.config import compose
from launcher.config.schema import ClusterConfig, HardwareConfig
from launcher.cost import predict
from launcher.cost.calibration import COPY, _exchange, _product, hardware, measured
from launcher.cost.inputs.constants import SHIPPED
from launcher.cost.inputs.device import Device
from tests import warm
from tests.cost.machines import HARDWARE, layout, mixed
from tests.warm import forked
from trainer.probe import OPERATION, groups_of, pair_of
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import ModelConfig

__all__ = ["forked"]  # for all tests here
pytestmark = pytest.mark.slow

SHAPES = ((64, 64, 64), (64, 256, 64), (256, 256, 256), (256, 1024, 256), (512, 512, 1024))
KINDS = [
    (name, *group) for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all") for group in ((2, 2), (4, 4), (2, 1), (8, 4))
]
KINDS += [("send", 2, 2), ("send", 2, 1)]
TINY = ModelConfig(layers=8, hidden=128, heads=4, vocab=512, seq=64)


def planted(host: bool, **device: Any) -> dict[str, Any]:
    """What a probe would find on a machine that the mechanisms describe well, but for a tenth here and there."""
    true = dataclasses.replace(Device.of(HARDWARE["cpu" if host else "h100"], 4), **device)
    wobble = np.random.default_rng(1).uniform(0.9, 1.1, 1000).tolist()
    exchanges = []
    for name, size, near in KINDS:
        for payload in (4 << 10, 64 << 10, 4 << 20):
            one = {"operation": name, "size": size, "near": near, "bytes": payload}
            seconds = float(_exchange(true, one, SHIPPED)) * wobble.pop()
            exchanges.append(one | {"seconds": 10 * seconds if host else seconds, "busy_s": seconds})
    products = [{"precision": "fp32", "m": m, "n": n, "k": k} for m, n, k in SHAPES]
    products = [p | {"seconds": _product(true, "fp32", p, SHIPPED) * wobble.pop()} for p in products]
    about: dict[str, Any] = {"nodes": 2, "per_node": 4, "hosts": ["a", "b"], "torch": "", "host": host, "units": 132}
    about |= (
        {"device": "cpu", "memory_bytes": None, "cores": 2} if host else {"device": "NVIDIA H100 80GB HBM3", "memory_bytes": 85_520_809_984}
    )
    block = {"block": 4e-4, "micro_batch": 2e-4, "step": 3e-4}
    return about | {
        "products": products,
        "exchanges": exchanges,
        "copy": {"bytes": 1 << 25, "seconds": 2 * (1 << 25) / (COPY * true.bandwidth)},
        "block": block,
    }


@pytest.mark.parametrize("host", [True, False])
def test_what_was_measured_is_what_is_predicted(host: bool) -> None:
    figures = planted(host)
    found = hardware("mine", figures, None if host else HARDWARE["h100"])
    device = Device.of(found, 4)
    device = dataclasses.replace(device, measured=measured(found, device))
    for one in figures["exchanges"]:
        assert float(_exchange(device, one, SHIPPED)) == pytest.approx(one["busy_s"], rel=0.01), one
    for p in figures["products"]:
        assert _product(device, "fp32", p, SHIPPED) == pytest.approx(p["seconds"], rel=0.12), p


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize(
    ("kind", "part"),
    [("products", "matrix products"), ("copy", "memory-bound operations"), ("exchanges", "gradient reduction"), ("block", "launching"),
     ("block", "head and loss"), ("block", "fixed cost of a step")],
)  # fmt: skip
def test_all_that_is_measured_is_used(host: bool, kind: str, part: str) -> None:
    """Of a model so small that the host decides; each measurement alone, five times as slow."""

    def time(figures: dict[str, Any]) -> float:
        found = hardware("mine", figures, None if host else HARDWARE["h100"])
        cluster = ClusterConfig(gpus_per_node=4, hardware=found)
        return predict(TINY, layout(data=4), mixed(16, "fp32"), cluster).time[part]

    figures = planted(host)
    slower: Any = copy.deepcopy(figures)
    entries = {"products": slower["products"], "copy": [slower["copy"]], "exchanges": slower["exchanges"], "block": [slower["block"]]}[kind]
    for entry in entries:
        entry |= {name: 5 * value for name, value in entry.items() if name in ("seconds", "busy_s", "block", "micro_batch", "step")}
    assert time(slower) > 1.2 * time(figures)


def test_constants_of_a_machine_replace_those_that_ship() -> None:
    slow = dataclasses.replace(HARDWARE["h100"], constants={"network": 0.3})
    near, far = (
        predict(TINY, layout(data=16), mixed(16), ClusterConfig(nodes=2, gpus_per_node=8, hardware=h)) for h in (HARDWARE["h100"], slow)
    )
    assert far.time["gradient reduction"] > near.time["gradient reduction"] and far.time["matrix products"] == near.time["matrix products"]
    wrong = dataclasses.replace(HARDWARE["h100"], constants={"netwrk": 0.3})
    with pytest.raises(ConfigError, match=r"unknown key cluster\.hardware\.constants\.netwrk; did you mean 'network'"):
        predict(TINY, layout(), mixed(16), ClusterConfig(gpus_per_node=1, hardware=wrong))


def test_links_and_network_are_found_again() -> None:
    found = hardware("mine", planted(False, link=2e11, link_latency=8e-6, network=2e10, network_latency=3e-5), HARDWARE["h100"])
    assert found.link_gbs == pytest.approx(200, rel=0.25) and found.network_gbs == pytest.approx(20, rel=0.25)
    assert found.link_latency_us == pytest.approx(8, rel=0.4) and found.network_latency_us == pytest.approx(30, rel=0.4)


def test_a_data_sheet_keeps_its_peaks_and_a_known_gpu_is_found_by_its_own_name() -> None:
    figures = planted(False)
    sheet = doctor.data_sheet(figures, HARDWARE)
    assert sheet is HARDWARE["h100"]
    assert hardware("mine", figures, sheet).peak_tflops == HARDWARE["h100"].peak_tflops
    assert doctor.data_sheet(figures | {"device": "some GPU"}, HARDWARE) is None
    assert doctor.data_sheet(planted(True), HARDWARE) is None


def test_no_rate_that_is_reached_is_above_its_peak() -> None:
    """Under load a median over products may come out above the best single one."""
    sheet = HardwareConfig(peak_tflops={"fp32": 0.114, "fp64": 0.05}, sustained_tflops={"fp32": 0.142, "bf16": 0.2})
    raised, clamped = doctor.consistent(sheet, None), doctor.consistent(sheet, sheet)
    assert raised.peak_tflops == {"fp32": 0.142, "fp64": 0.05} and raised.sustained_tflops == sheet.sustained_tflops
    assert clamped.peak_tflops == sheet.peak_tflops and clamped.sustained_tflops == {"fp32": 0.114, "bf16": 0.2}


def test_the_file_is_composed_as_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    figures = planted(True)
    found = hardware("mine", figures)
    doctor.write(doctor.target("mine", "--name"), found, doctor.origin(figures, compose([])), "--name")
    assert compose(["hardware=mine"]).cluster.hardware == found


def on_cores(cores: int | None, ranks: int, **degrees: Any) -> Any:
    found = dataclasses.replace(hardware("mine", planted(True)), cores=cores)
    return predict(TINY, layout(**degrees), mixed(16, "fp32"), ClusterConfig(gpus_per_node=ranks, hardware=found))


def test_ranks_that_share_cores_take_turns_and_fill_each_others_bubbles() -> None:
    alone, shared = on_cores(8, 4, pipeline=4), on_cores(1, 4, pipeline=4)
    assert shared.time["matrix products"] == pytest.approx(4 * alone.time["matrix products"])
    assert alone.time["pipeline bubble"] > 0.1 * alone.step_time_s, "four stages of four cores wait for each other"
    assert shared.time["pipeline bubble"] == 0, "one core always has a rank to run"


def test_with_a_core_for_each_rank_a_file_without_cores_says_the_same() -> None:
    assert on_cores(8, 4, data=2, pipeline=2).step_time_s == pytest.approx(on_cores(None, 4, data=2, pipeline=2).step_time_s)


@given(per_node=st.integers(1, 9), nodes=st.integers(1, 6))
def test_all_ranks_of_a_group_measure_it_at_the_same_time(per_node: int, nodes: int) -> None:
    everyone = range(per_node * nodes)
    groups = {rank: groups_of(rank, per_node, nodes) for rank in everyone}
    for rank in everyone:
        for place, (ranks, near) in enumerate(groups[rank]):
            assert rank in ranks and all(groups[other][place] == (ranks, near) for other in ranks)
            assert max(sum(other // per_node == node for other in ranks) for node in range(nodes)) == near
        for distance in {1, per_node}:
            pair = pair_of(rank, distance, per_node, len(everyone))
            assert rank in pair and all(pair_of(other, distance, per_node, len(everyone)) == pair for other in pair)


BRIEF = """
import runpy
from dataclasses import replace
from trainer import probe
probe.HOST = replace(probe.HOST, products=probe.HOST.products[:4], product_s=0.003, message_s=0.01)
probe.TURNS = 2
runpy.run_module("trainer.fork_server", run_name="__main__", alter_sys=True)
"""
"""Forks ranks whose probe repeats nothing for long."""


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.campaign("launchers"))], ids=["brief", "whole"])
def test_doctor_measures_this_machine_into_a_file_that_plan_reads(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if not whole:
        monkeypatch.setattr(fork_server, "start_server", lambda _, errors: warm.start_server([sys.executable, "-P", "-c", BRIEF], errors))
    assert main(["doctor", "--json", "--name", "here", "cluster.gpus_per_node=2"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    found = HardwareConfig(**document["hardware"])
    assert "all_reduce over 2 ranks" in captured.err and document["file"] == "runs/hardware/here.yaml"
    assert found.peak_tflops["fp32"] > 1e-4 and found.sustained_tflops["fp32"] <= found.peak_tflops["fp32"]
    assert found.memory_bandwidth_gbs and found.cores == len(os.sched_getaffinity(0))
    assert {one["operation"] for one in found.calibration["exchanges"]} == {*OPERATION, "send"}
    assert {one["operation"] for one in found.calibration["waking"]} == {"all_reduce", "all_gather", "send"}
    assert compose(["hardware=here"]).cluster.hardware == found
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()] == ["runs/hardware/here.yaml"]


@pytest.mark.parametrize("torn", [{"x": 1}, {"products": []}, {"products": 3, "exchanges": [], "block": {}}])
def test_a_torn_calibration_is_one_plain_error(torn: dict[str, Any]) -> None:
    config = dataclasses.replace(HARDWARE["a100_80"], calibration=torn)
    with pytest.raises(ConfigError, match=r"cluster\.hardware\.calibration .*run that again"):
        measured(config, Device.of(HARDWARE["a100_80"], 8))


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launcher.cli.main", "doctor", "cluster.gpus_per_node=2"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    running = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    for line in running.stderr:
        if "products" in line:
            break
    family = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130
    deadline = time.monotonic() + 300
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)
    assert [path for path in tmp_path.rglob("*") if path.is_file() or path.name == "doctor"] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--name", "h100"], "ships with Trireme"),
        (["--name", "a/b"], "cannot name a file"),
        (["cluster.nodes=2"], "this one machine"),
        (["cluster.gpus_per_node=1", "--json", "cluster.nodes=2"], "this one machine"),
        (["hardware=nothing"], "nothing"),
        (["run.devise=cpu"], "run.device"),
    ],
)
def test_wrong_input_is_one_plain_line(words: list[str], said: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1 and list(tmp_path.iterdir()) == []


def test_ranks_that_fail_say_why(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "cluster.gpus_per_node=1", "run.device=cuda"]) == 1
    assert "needs CUDA device 0" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.yaml"))


def test_a_probe_is_no_training(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "run.task=probe", "data=synthetic"]) == 2
    assert "trireme doctor" in capsys.readouterr().err


def test_a_name_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="cannot name a file"):
        doctor.target(".hidden", "--name")
