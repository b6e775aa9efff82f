"""What published tables say of devices and networks."""

from __future__ import annotations

import pytest

from benchmarks.published.interconnect import network_rate
from benchmarks.published.machine import machine_cells
from benchmarks.published.raw import RawRow

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("gpu", "file"),
    [
        ("V100-16GB", "v100_16"), ("V100-32GB-SXM3", "v100_32"), ("A100-40GB-SXM", "a100_40"), ("A100-SXM", "a100_80"), ("A800-80GB", "a800"),
        ("H800-80GB-SXM", "h800"), ("H20", "h20"), ("H200-141GB-SXM", "h200"), ("GH200-96GB", "gh200"), ("H100-96GB-SXM (HBM2e)", "h100_96"),
        ("H100-80GB-SXM", "h100"), ("GB200", "gb200"), ("GB300-SXM", "gb300"), ("B200-180GB", "b200"), ("MI250X", "mi250x"), ("MI300X", "mi300x"),
        ("MI325X", "mi325x"), ("MI355X", "mi355x"), ("L40S", "l40s"), ("A40", "a40"), ("RTX 4090", "rtx_4090"),
    ],
)  # fmt: skip
def test_names_of_gpus_find_their_file(gpu: str, file: str) -> None:
    assert machine_cells(RawRow(1, {"gpu": gpu}))["hardware"] == file


def test_a_device_that_nobody_described_keeps_its_name() -> None:
    assert [machine_cells(RawRow(1, {"gpu": gpu}))["hardware"] for gpu in ("", "TPU v4")] == [None, "TPU v4"]


def test_a_card_on_pcie_has_no_nvlink() -> None:
    card, module = (machine_cells(RawRow(1, {"gpu": f"A100-80GB-{form}"})) for form in ("PCIe", "SXM"))
    assert (card["link_gbs"], module["link_gbs"]) == (25, None) and card["memory_gb"] == module["memory_gb"] == pytest.approx(80 * 1.06)


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ("NVSwitch in node; 8x200 Gb/s per node", 25.0), ("4x100Gb per node", 6.25), ("200 Gbps per node", 3.125), ("RDMA 400 Gb/s per GPU", 50.0),
        ("4x HDR InfiniBand per node", 12.5), ("NVLink in node", None), ("8x HDR200", 25.0), ("InfiniBand 100 Gb/s (4X EDR) per node", 1.5625),
        ("NVLink 900 GB/s per GPU; 8 x ConnectX-7 400 Gb/s", 50.0), ("1.6 Tbps RoCE per server", 25.0), ("8x400G NDR", 50.0), ("25 GB/s per GPU", 25.0),
        ("AWS p4d", 6.25), ("NVSwitch; EFA 3200 Gbps", 50.0), ("25 GbE", 0.390625), ("10 Gb/s Ethernet", 0.15625), ("one NDR port per GPU", 50.0),
        ("InfiniBand 200 Gb/s HDR between nodes", None), ("NVLink (A800 400 GB/s)", None), ("PCIe 4.0 x16, 32 GB/s", None), ("80 GB devices", None), ("NVSwitch in node and 8x200 Gb/s IB per node", 25.0),
    ],
)  # fmt: skip
def test_wordings_of_a_network_say_what_each_device_gets(words: str, rate: float | None) -> None:
    assert network_rate(words, 8) == rate


@pytest.mark.parametrize(
    ("words", "link"), [("PCIe 4.0 in node", 25), ("no NVLink: PCIe", 25), ("NVLink, PCIe switches", None), ("", None)]
)
def test_devices_joined_by_pcie_alone_have_no_nvlink(words: str, link: float | None) -> None:
    assert machine_cells(RawRow(1, {"gpu": "A100-80GB-SXM", "interconnect": words}))["link_gbs"] == link
