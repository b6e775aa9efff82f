"""What the interconnect column of a table says: rates between nodes and inside them, in the words that publications use."""

from __future__ import annotations

import re
from typing import NamedTuple

PCIE = 25
"""1e9 bytes/s that a device reaches over PCIe 4 x16."""

OMNI_PATH = 0.28
"""Fraction of four 100 Gb/s Omni-Path ports that collectives of GPU memory reached on the cluster of the BigScience notes: its
all-reduces of 4 GB (collectives.csv, algorithm rates 7.5 and 4.9 GB/s) are bus rates of 14 GB/s of 50 on 4 nodes of V100 and 9.6 on 16;
those of its A100 nodes were measured before a repair."""

INFINIBAND = {"FDR": 56, "EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800}
"""Gb/s of a port of four lanes, by generation."""

CLOUDS = (
    (r"p3dn", 100), (r"\bp4de?\b", 400), (r"\bp5e?n?\b", 3200), (r"nd40rs", 100), (r"nd96a\w*sr|nd a100", 1600),
    (r"nd96is\w*|nd h[12]00", 3200), (r"a2-(high|mega|ultra)gpu", 100), (r"a3-high", 800), (r"a3-mega", 1600), (r"a3-ultra|a4-high", 3200),
)  # fmt: skip
"""Gb/s that an instance of a cloud has for its devices, by the provider's documentation."""

EFA = 55
"""Microseconds of a step between nodes over Amazon's EFA: what steps of rings and trees take in nccl-tests of up to 256 MiB, all-gathers
and all-reduces on 2 to 32 nodes of H100 (crazyguitar/aws-gpu-communication-benchmark) and all-reduces on 4 of B200 (stas00/ml-engineering).
The squares of the logarithm of predicted over measured are least there, each of the three tables counted once. A write of 8 bytes alone
takes 18 to 20 (aws-ofi-nccl, src/tuner)."""

_FAST = re.compile(r"(?<!no )(?:nvlink|nvswitch|infinity fabric|xgmi)", re.IGNORECASE)
_PCIE = re.compile(r"\bpcie\b", re.IGNORECASE)
_COUNT = r"(?:(?P<count>\d+)\s*[x×]\s*(?:[A-Za-z][\w-]*\s+){0,2}?)?"
_AMOUNT = re.compile(_COUNT + r"(?P<rate>\d+(?:\.\d+)?)[\s-]?(?P<unit>[TG])(?P<kind>b/s|bps|bit|bE\b|igabit|B/s|Bps|b\b|\b)", re.ASCII)
_GENERATION = re.compile(_COUNT + rf"(?P<generation>{'|'.join(INFINIBAND)})(?:[\d ]|\b)")
_PER_DEVICE = re.compile(r"(?:\bper|\ba|\bfor each|/)\s*(?:gpu|device|accelerator|gcd|card)\b", re.IGNORECASE)
_PER_NODE = re.compile(r"(?:\bper|\ba|\beach|/)\s*(?:\d+-gpu\s+)?(?:node|host|server|machine|instance|vm)\b", re.IGNORECASE)
_ONE_PER_NODE = re.compile(r"\befa\b|ethernet|\d\s?gbe\b|\btcp\b|\bin all\b|total|aggregate", re.IGNORECASE)


class Links(NamedTuple):
    """Rates in 1e9 bytes/s and device, microseconds of a message between nodes, and devices that share a domain; None: not said."""

    network: float | None
    latency: float | None
    inside: float | None
    domain: int | None


def links_of(words: str, per_node: int) -> Links:
    """What ``words`` say of nodes of ``per_node`` devices."""
    domain = re.search(r"NVLink domain (\d+)", words)
    on_pcie = _PCIE.search(words) and not _FAST.search(words)
    latency = EFA if re.search(r"\befa\b", words, re.IGNORECASE) else None
    return Links(network_rate(words, per_node), latency, PCIE if on_pcie else None, int(domain.group(1)) if domain else None)


def network_rate(words: str, per_node: int) -> float | None:
    """1e9 bytes per second and device between nodes. A rate of which it is not said whose it is, a device's or a node's, is None."""
    if "Omni-Path" in words:
        return 4 * 100 / 8 / per_node * OMNI_PATH
    for clause in re.split(r"[;,+]|\band\b|\bwith\b", words):
        if (rate := _rate(clause, per_node)) is not None:
            return rate
    cloud = next((gbits for pattern, gbits in CLOUDS if re.search(pattern, words, re.IGNORECASE)), None)
    return cloud / 8 / per_node if cloud else None


def _rate(clause: str, per_node: int) -> float | None:
    amount = _AMOUNT.search(clause)
    found = amount or _GENERATION.search(clause)
    if found is None or _FAST.search(clause) or _PCIE.search(clause):
        return None
    gbytes = _gbytes(amount) if amount else INFINIBAND[found["generation"]] / 8
    gbytes *= int(found["count"] or 1)
    if _PER_DEVICE.search(clause):
        return gbytes
    if found["count"] or _PER_NODE.search(clause) or _ONE_PER_NODE.search(clause):
        return gbytes / per_node
    return None


def _gbytes(amount: re.Match[str]) -> float:
    scale = 1000 if amount["unit"] == "T" else 1
    return float(amount["rate"]) * scale / (1 if amount["kind"].startswith("B") else 8)
