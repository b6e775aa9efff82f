"""The machine of a published row as canonical cells: names of GPUs, and what its words say of memory and links."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.published.interconnect import PCIE, links_of
from benchmarks.published.raw import RawRow
from launcher.config.hardware import shipped_hardware
from launcher.config.schema import HardwareConfig

GPUS = (
    (r"V100-16", "v100_16"), (r"V100", "v100_32"), (r"A100-40", "a100_40"), (r"A100", "a100_80"), (r"A800", "a800"), (r"A40\b", "a40"),
    (r"GH200", "gh200"), (r"GB300", "gb300"), (r"GB200", "gb200"), (r"B300", "b300"), (r"B200", "b200"), (r"H200", "h200"),
    (r"H100-9\d|H100.*500 W", "h100_96"), (r"H100", "h100"), (r"H800", "h800"), (r"H20\b", "h20"), (r"L40", "l40s"), (r"4090", "rtx_4090"),
    (r"MI2\d\d", "mi250x"), (r"MI325", "mi325x"), (r"MI35\d", "mi355x"), (r"MI3\d\d", "mi300x"),
)  # fmt: skip
"""Patterns of GPU names and their files in conf/hardware."""

USABLE = 1.06
"""Usable 1e9 bytes per gigabyte in the name of a GPU: it counts 2^30, of which the driver keeps one or two percent."""


def machine_cells(row: RawRow) -> dict[str, Any]:
    """Cells of the device and its links; None where the hardware file's value stands, or where the device is not known."""
    links = ("link_gbs", "link_domain", "network_gbs", "network_latency_us")
    names = ("hardware", "gpus_per_node", "memory_gb", "memory_bandwidth_gbs", *links)
    gpu, known, cells = row.text("gpu"), shipped_hardware(), dict[str, Any].fromkeys(names)
    name = gpu if gpu in known else next((file for pattern, file in GPUS if re.search(pattern, gpu, re.IGNORECASE)), None)
    if name is None:
        return cells | {"hardware": gpu or None}
    words, config = row.text("interconnect"), known[name]
    per_node = _per_node(row, words, config)
    said = links_of(words, per_node)
    if found := re.search(r"(\d+)\s*GB", gpu):
        cells["memory_gb"] = float(found.group(1)) * USABLE
    if found := re.search(r"(\d+(?:\.\d+)?) TB/s", gpu):
        cells["memory_bandwidth_gbs"] = float(found.group(1)) * 1000
    if said.inside or re.search("PCIe", gpu, re.IGNORECASE):
        cells["link_gbs"] = float(min(config.link_gbs or PCIE, PCIE))
    cells |= {"network_gbs": said.network, "network_latency_us": said.latency, "link_domain": said.domain}
    return cells | {"hardware": name, "gpus_per_node": per_node}


def _per_node(row: RawRow, words: str, config: HardwareConfig) -> int:
    if found := re.search(r"\((\d+) GPUs\)|(\d+) GPUs per node", words):
        return int(found.group(1) or found.group(2))
    gpus, nodes = row.whole("gpus"), row.whole("nodes")
    if gpus and nodes and gpus % nodes == 0:
        return gpus // nodes
    return 4 if (config.link_domain or 8) > 8 else 8


def precision_of(row: RawRow) -> str:
    """The number format of the matrix products."""
    text = row.text("precision").lower()
    if "fp4" in text:
        return "fp4"
    if "fp8" in text:
        return "fp8"
    if "fp16" in text and "bf16" not in text:
        return "fp16"
    if text == "fp32":
        return "fp32"
    return "fp16" if row.text("gpu").startswith("V100") else "bf16"
