"""From a published row to a question for the cost model, or the reason why it cannot be asked.

Cells that a row leaves blank are filled by what its source documents (``launcher.tables.publishers``), then by common rules: an MLP
of 4 hidden, heads of 128, one replica per remaining GPU.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from launcher.config.schema import HardwareConfig
from launcher.config.trainer import TrainerProfile
from launcher.config.trainers import changed, profile
from launcher.cost.device import Device
from launcher.cost.layouts import BALANCES, LAYOUT_DTYPE
from launcher.cost.shape import Experts, LatentAttention, Shape
from launcher.tables.links import PCIE, links_of
from launcher.tables.published import COUNTS, Row
from launcher.tables.publishers import Publisher, publisher
from trainer.config.schema import RECOMPUTE, SCHEDULES


class Unanswerable(ValueError):
    """A row that cannot be predicted; the message is the reason, the same for all rows of its kind."""


@dataclass(frozen=True)
class Question:
    """All that the cost model needs for one row."""

    row: Row
    shape: Shape
    layout: np.void
    global_batch: int
    device: Device
    precision: str
    trainer: TrainerProfile
    publisher: Publisher


def question(row: Row, hardware: dict[str, HardwareConfig], trainer: TrainerProfile | None = None) -> Question:
    """The question that ``row`` poses; ``trainer`` replaces its own. ``Unanswerable`` with the reason when it does not say enough."""
    who = publisher(row)
    for name in COUNTS:
        if row.text(name) and row.whole(name) is None:
            raise Unanswerable(f"{name} is no positive whole number")
    shape = shape_of(row, who)
    layout, batch = layout_of(row, who)
    _check(row, shape, layout)
    return Question(
        row, shape, layout, batch, device_of(row, hardware), precision_of(row), trainer or changed(profile(who.trainer), who.changes), who
    )


def _check(row: Row, shape: Shape, layout: np.void) -> None:
    """What no trainer could run. Embedding and head may count as blocks where stages have several chunks."""
    chunks = int(layout["pipeline"]) * int(layout["virtual_pipeline"])
    if layout["pipeline"] > shape.layers or chunks > shape.layers + 2:
        raise Unanswerable("more stages than layers")
    if row.text("heads") and shape.heads % layout["tensor"]:
        raise Unanswerable("tensor degree does not divide the heads")
    if shape.experts is not None and layout["expert"] > min(shape.experts.count, layout["data"] * layout["context"] * layout["tensor"]):
        raise Unanswerable("more expert ranks than experts or replicas")
    if shape.heads % shape.kv_heads:
        raise Unanswerable("kv_heads do not divide the heads")


# ---------------------------------------------------------------------------------------------------- model

EXPERTS = (
    # (name, experts, active, inner width, shared inner width, leading dense blocks, their inner width): public model cards
    (r"deepseek.?v3.*16b|deepseek.*16b", Experts(64, 6, 1408, 2816, 1), 10944),
    (r"deepseek.?v3|deepseekv3", Experts(256, 8, 2048, 2048, 3), 18432),
    (r"kimi", Experts(384, 8, 2048, 2048, 1), 18432),
    (r"qwen3.?_?30b", Experts(128, 8, 768), 6144),
    (r"qwen3.?_?235b", Experts(128, 8, 1536), 12288),
    (r"gpt.?oss.?120b", Experts(128, 4, 2880), 2880),
    (r"gpt.?oss.?20b", Experts(32, 4, 2880), 2880),
    (r"mixtral.?8x7b", Experts(8, 2, 14336), 14336),
    (r"mixtral.?8x22b", Experts(8, 2, 16384), 16384),
    (r"grok", Experts(8, 2, 32768), 32768),
)
LATENT = LatentAttention(1536, 512)


def shape_of(row: Row, who: Publisher) -> Shape:
    """The model of a row."""
    layers, hidden, seq = row.whole("layers"), row.whole("hidden"), row.whole("seq")
    if not (layers and hidden and seq):
        raise Unanswerable("layers, hidden or seq not given")
    arch = row.text("arch") or ("llama" if "llama" in row.text("model").lower() else "gpt")
    if arch not in ("gpt", "llama", "moe"):
        raise Unanswerable(f"no model of the {arch} architecture")
    experts, ffn = _experts(row) if arch == "moe" else (None, None)
    llama = arch != "gpt"
    heads = row.whole("heads") or _likely_heads(hidden)
    ffn = ffn or row.whole("ffn") or (64 * math.ceil(8 * hidden / 3 / 64) if llama else 4 * hidden)
    latent = LATENT if arch == "moe" and re.search("deepseek|kimi", row.text("model"), re.IGNORECASE) else None
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=row.whole("kv_heads") or heads,
        head_width=128 if latent else _head_width(row, hidden, heads),
        ffn=ffn,
        vocab=row.whole("vocab") or who.vocab or (32000 if llama else 51200),
        seq=seq,
        gated=llama,
        tied=not llama if who.tied is None else who.tied,
        biases=not llama,
        scale_only_norm=llama,
        positions=0 if llama else seq,
        rotary=llama,
        dropout=who.dropout,
        frozen="lora" in row.text("model").lower(),
        experts=experts,
        latent=latent,
    )


def _head_width(row: Row, hidden: int, heads: int) -> float:
    """Qwen3 and GPT-OSS fix the width of a head; everywhere else the heads share the hidden width."""
    if re.search("qwen3", row.text("model"), re.IGNORECASE):
        return 128
    return 64 if re.search("gpt.?oss", row.text("model"), re.IGNORECASE) else hidden / heads


def _experts(row: Row) -> tuple[Experts, int]:
    for pattern, experts, ffn in EXPERTS:
        if re.search(pattern, row.text("model"), re.IGNORECASE):
            return experts, ffn
    found = re.search(r"experts (\d+), top-k (\d+), expert ffn (\d*)", row.notes)
    inner = row.whole("ffn") or 0
    if not found or not (found.group(3) or inner):
        raise Unanswerable("experts of the model not known")
    return Experts(int(found.group(1)), int(found.group(2)), int(found.group(3) or inner)), inner or int(found.group(3))


def _likely_heads(hidden: int) -> int:
    """A head count that divides ``hidden`` into heads of about 128."""
    divisors = [n for n in range(1, hidden // 32 + 1) if hidden % n == 0]
    return min(divisors or [1], key=lambda n: abs(math.log(hidden / n / 128)))


# ---------------------------------------------------------------------------------------------------- layout


def layout_of(row: Row, who: Publisher) -> tuple[np.void, int]:
    """The layout of a row as a record, and its global batch."""
    gpus = row.whole("gpus")
    fully_sharded = bool(re.search("fsdp|zero-3", row.sharding))
    tensor, pipeline = row.whole("tp") or (1 if fully_sharded else None), row.whole("pp") or (1 if fully_sharded else None)
    if not gpus:
        raise Unanswerable("number of GPUs not given")
    if not (tensor and pipeline):
        raise Unanswerable("tensor or pipeline degree not given")
    context = row.whole("cp") or 1
    data = gpus // (tensor * pipeline * context)
    if data * tensor * pipeline * context != gpus:
        raise Unanswerable("degrees do not multiply to the number of GPUs")
    batch = row.whole("gbs") or _likely_batch(row, data, fully_sharded)
    if not batch:
        raise Unanswerable("global batch not given")
    micro_batch = row.whole("mbs") or _likely_micro_batch(batch, data, pipeline, who)
    if micro_batch * data > batch:
        raise Unanswerable("batch too small for the replicas")
    record = np.zeros(1, LAYOUT_DTYPE)[0]
    virtual = row.whole("virtual_pp") or 1
    virtual = virtual if pipeline > 1 else 1
    values: dict[str, Any] = {
        "tensor": tensor, "pipeline": pipeline, "virtual_pipeline": virtual, "data": data, "context": context,
        "expert": row.whole("ep") or 1, "micro_batch": micro_batch, "order": 0, "balance": BALANCES.index(who.balance),
        "schedule": SCHEDULES.index(_schedule(row, virtual) if pipeline > 1 else "1f1b"),
        "sequence_parallel": tensor > 1 and (who.sequence_parallel if row.yes("sequence_parallel") is None else row.yes("sequence_parallel")),
    }  # fmt: skip
    for name, value in {**values, **_recompute(row.text("recompute") or who.recompute), **_sharding(row, who, data, context)}.items():
        record[name] = value
    return record, batch


def _schedule(row: Row, virtual: int) -> str:
    """The schedule that a row names, if chunks allow it; else the usual one."""
    if virtual > 1:
        return "interleaved"
    return "zero_bubble" if row.schedule.startswith("zb") else row.schedule or "1f1b"


def _likely_batch(row: Row, data: int, fully_sharded: bool) -> int | None:
    """Micro-batches that the notes count, or a single one where parameters are sharded: they would be gathered for each."""
    named = re.search(r"MBS=(\d+)", row.text("model"))
    size = row.whole("mbs") or (int(named.group(1)) if named else None)
    counted = re.search(r"micro_num\D{0,3}(\d+)|gradient accumulation (\d+)|(\d+) micro-?batches per step", row.notes)
    count = int(next(filter(None, counted.groups()))) if counted else int(fully_sharded)
    return size * count * data if size and count else None


def _likely_micro_batch(batch: int, data: int, pipeline: int, who: Publisher) -> int:
    """A pipeline wants many small micro-batches; without one a replica's share is most often a single one."""
    if pipeline > 1 and who.micro_batches == "as stages":
        return max(1, batch // (data * pipeline))
    return 1 if pipeline > 1 else max(1, min(4, batch // data))


def _recompute(words: str) -> dict[str, int]:
    text = words.lower()
    values = {"recompute": RECOMPUTE.index("none"), "recompute_layers": -1, "recompute_every": 1}
    if found := re.match(r"(\d+) (?:of \d+ )?(?:layers|blocks)", text):
        values |= {"recompute": RECOMPUTE.index("full"), "recompute_layers": int(found.group(1))}
    elif found := re.match(r"every (\d+)", text):
        values |= {"recompute": RECOMPUTE.index("full"), "recompute_every": int(found.group(1))}
    elif text.startswith("selective"):
        values["recompute"] = RECOMPUTE.index("selective")
    elif re.match(r"full|yes|uniform|(activation |gradient )?checkpoint", text):
        values["recompute"] = RECOMPUTE.index("full")
    return values


def _sharding(row: Row, who: Publisher, data: int, context: int) -> dict[str, int]:
    """Sharding factors; they count context ranks as replicas, as trainers that shard over both do."""
    text = row.sharding or who.sharding.lower()
    if found := re.match(r"amsp p(\d+) g(\d+) os(\d+)", text):
        p, g, o = (math.gcd(int(n), data) for n in found.groups())
        return {"params": p, "grads": g, "optimizer": o}
    size = re.search(r"(?:fsdp2?|zero-3 \(\w+\)|mics\)?|hsdp\)?|hybrid.?shard\)?|\bover|\bacross|\bgroups? of)\s+(\d+)", text)
    ranks = math.gcd(int(size.group(1)), data) if size else data
    if re.search("mics|hybrid.?shard|hsdp", text):
        ranks = ranks if size else math.gcd(8, data)
        return {"params": ranks, "grads": ranks, "optimizer": ranks}
    if re.search("parameters not resharded|zero-2|shard_grad_op", text):
        return {"params": 1, "grads": ranks, "optimizer": ranks}
    if re.search(r"zero-3|^fsdp|zero\+\+|full_shard", text):
        return {"params": ranks, "grads": ranks, "optimizer": ranks}
    if re.search("zero-1|^distributed optimizer", text):
        return {"params": 1, "grads": 1, "optimizer": ranks}
    return {"params": 1, "grads": 1, "optimizer": 1}


# ---------------------------------------------------------------------------------------------------- machine

GPUS = (
    (r"V100-16", "v100_16"), (r"V100", "v100_32"), (r"A100-40", "a100_40"), (r"A100", "a100_80"), (r"A800", "a800"), (r"A40\b", "a40"),
    (r"GH200", "gh200"), (r"GB300", "gb300"), (r"GB200", "gb200"), (r"B300", "b300"), (r"B200", "b200"), (r"H200", "h200"),
    (r"H100-9\d|H100.*500 W", "h100_96"), (r"H100", "h100"), (r"H800", "h800"), (r"H20\b", "h20"), (r"L40", "l40s"), (r"4090", "rtx_4090"),
    (r"MI2\d\d", "mi250x"), (r"MI325", "mi325x"), (r"MI35\d", "mi355x"), (r"MI3\d\d", "mi300x"),
)  # fmt: skip
"""Patterns of GPU names and their files in conf/hardware."""


USABLE = 1.06
"""Usable 1e9 bytes per gigabyte in the name of a GPU: it counts 2^30, of which the driver keeps one or two percent."""


def device_of(row: Row, hardware: dict[str, HardwareConfig]) -> Device:
    """The device and network of a row: the hardware file of its GPU, corrected by what the row prints of memory and links."""
    gpu = row.text("gpu")
    if not gpu:
        raise Unanswerable("GPU not given")
    name = gpu if gpu in hardware else next((file for pattern, file in GPUS if re.search(pattern, gpu, re.IGNORECASE)), None)
    if name is None or name not in hardware:
        raise Unanswerable(f"GPU {gpu} not known")
    config = hardware[name]
    changes: dict[str, Any] = {}
    if found := re.search(r"(\d+)\s*GB", gpu):
        changes["memory_gb"] = float(found.group(1)) * USABLE
    if found := re.search(r"(\d+(?:\.\d+)?) TB/s", gpu):
        changes["memory_bandwidth_gbs"] = float(found.group(1)) * 1000
    words = row.text("interconnect")
    per_node = _per_node(row, words, config)
    links = links_of(words, per_node)
    if links.inside or re.search("PCIe", gpu, re.IGNORECASE):
        changes["link_gbs"] = min(config.link_gbs or PCIE, PCIE)
    if links.network is not None:
        changes["network_gbs"] = links.network
    if links.domain:
        changes["link_domain"] = links.domain
    return Device.of(dataclasses.replace(config, **changes), per_node)


def _per_node(row: Row, words: str, config: HardwareConfig) -> int:
    if found := re.search(r"\((\d+) GPUs\)|(\d+) GPUs per node", words):
        return int(found.group(1) or found.group(2))
    gpus, nodes = row.whole("gpus"), row.whole("nodes")
    if gpus and nodes and gpus % nodes == 0:
        return gpus // nodes
    return 4 if (config.link_domain or 8) > 8 else 8


def precision_of(row: Row) -> str:
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
