"""Published measurements of inference as canonical cells: two forms, static batches with lengths, and served load with concurrency.

Widths of named models come from public model cards; what a source does not say is listed in the column ``assumed``.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from benchmarks.published.machine import GPUS
from benchmarks.published.model import likely_heads
from benchmarks.published.raw import RawRow
from launcher.tables.inference import COLUMNS
from trainer.spec.schema import RATED

BATCHES = ("model", "layers", "hidden", "gpu", "tp", "pp", "batch", "input_len", "output_len", "latency_ms")
"""Columns of a table of static batches."""
SERVED = ("backend", "model_path", "system", "precision", "isl", "osl", "batch_size", "tp_size", "pp_size", "silicon_tpot_ms")
"""Columns of a table of served load."""


class Card(NamedTuple):
    """Widths of a public model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool = False
    head_width: int = 128


CARDS = (
    (r"llama-?3.*\b8b", Card(32, 4096, 32, 8, 14336, 128256)), (r"llama-?3.*\b70b", Card(80, 8192, 64, 8, 28672, 128256)),
    (r"llama-?3.*\b405b", Card(126, 16384, 128, 8, 53248, 128256)), (r"qwen3-32b", Card(64, 5120, 64, 8, 25600, 151936)),
    (r"qwen3-14b", Card(40, 5120, 40, 8, 17408, 151936)), (r"qwen3-8b", Card(36, 4096, 32, 8, 12288, 151936)),
    (r"qwen2\.5-72b", Card(80, 8192, 64, 8, 29568, 152064)), (r"qwen2\.5-32b", Card(64, 5120, 40, 8, 27648, 152064)),
)  # fmt: skip
ENGINES = ((r"trtllm|tensorrt", "tensorrt_llm"), (r"vllm", "vllm"), (r"sglang", "sglang"))
DOUBTED = r"superseded|inconsistent|do not agree|suspiciously|misprint"
"""Words of notes that take a measurement back."""


def of_batches(row: RawRow) -> dict[str, Any]:
    """Cells of a row of static batches."""
    cells = _blank(row) | _model(row) | _machine(row.text("gpu"))
    cells |= {"tensor": row.whole("tp"), "pipeline": row.whole("pp"), "batch": row.whole("batch"), "replicas": 1, "mode": "static"}
    cells |= {"input": row.number_of("input_len"), "output": row.number_of("output_len")}
    engine, assumed = _engine(row), {"kv": "as the weights", "gpus_per_node": "usual"}
    weights = "fp16" if engine and not re.search("int8|fp32", row.notes) else None
    measured = None if re.search(DOUBTED, row.notes) else row.number_of("latency_ms")
    out = bool(re.search(r"\boom\b", row.notes, re.IGNORECASE))
    oom = True if out else False if row.number_of("latency_ms") else None
    cells |= {"engine": engine, "weights": weights, "kv": weights, "latency_ms": measured, "oom": oom}
    if cells["heads"]:
        assumed |= dict.fromkeys(("heads", "kv_heads", "head_width", "ffn", "vocab", "tied"), "usual of the family")
    if engine and not row.notes.lower().startswith("fastertransformer"):
        assumed |= {"engine": "the source's release", "weights": "usual"}
    if measured is None and row.number_of("latency_ms"):
        assumed["latency_ms"] = "left out: the source takes it back or contradicts it"
    return _done(cells, assumed)


def of_served(row: RawRow) -> dict[str, Any]:
    """Cells of a row of served load."""
    name, precision = row.text("model_path"), row.text("precision")
    card = next((card for pattern, card in CARDS if re.search(pattern, name, re.IGNORECASE)), None)
    cells = _blank(row) | _machine(row.text("system")) | {"source": "served load", "model": name or None}
    if card is not None:
        cells |= card._asdict() | {"family": "llama"}
    if (row.whole("moe_ep_size") or 1) > 1 or (row.whole("attention_dp_size") or 1) > 1:
        cells["family"] = None  # a mixture of experts, or attention of a layout of its own
    cells |= {
        "tensor": row.whole("tp_size"),
        "pipeline": row.whole("pp_size"),
        "batch": row.whole("batch_size"),
        "replicas": 1,
        "mode": "closed",
    }
    cells |= {
        "input": row.number_of("isl"),
        "output": row.number_of("osl"),
        "weights": (precision or "bf16") if precision in ("", *RATED) else None,
        "kv": "bf16",
    }
    cells["engine"] = next((profile for word, profile in ENGINES if word.split("|")[0] in row.text("backend").lower()), None)
    cells |= {"ttft_ms": row.number_of("silicon_ttft_ms"), "tpot_ms": row.number_of("silicon_tpot_ms"), "oom": False}
    cards = ("family", "layers", "hidden", "heads", "kv_heads", "head_width", "ffn", "vocab", "tied")
    assumed = dict.fromkeys(cards if card else (), "model card") | {"kv": "usual of the engine", "gpus_per_node": "usual"}
    return _done(cells, assumed | ({} if precision else {"weights": "usual where blank"}))


def _blank(row: RawRow) -> dict[str, Any]:
    return dict.fromkeys(COLUMNS) | {"source": row.source or None, "model": row.text("model") or None}


def _done(cells: dict[str, Any], assumed: dict[str, str]) -> dict[str, Any]:
    cells["assumed"] = "; ".join(f"{name} ({why})" for name, why in assumed.items() if name in cells) or "none"
    return {name: cells[name] for name in COLUMNS}


def _model(row: RawRow) -> dict[str, Any]:
    """A GPT of stated depth and width; None where the model is of another kind."""
    layers, hidden = row.whole("layers"), row.whole("hidden")
    plain = re.match(r"(gpt-|megatron-)", row.text("model"), re.IGNORECASE)
    if not (plain and layers and hidden):
        return {"layers": layers, "hidden": hidden}
    heads = likely_heads(hidden)
    sizes = {"heads": heads, "kv_heads": heads, "head_width": hidden / heads, "ffn": 4 * hidden, "vocab": 51200, "tied": True}
    return {"family": "gpt", "layers": layers, "hidden": hidden, **sizes}


def _machine(gpu: str) -> dict[str, Any]:
    name = next((file for pattern, file in GPUS if re.search(pattern, gpu, re.IGNORECASE)), None)
    return {"hardware": name or gpu or None, "gpus_per_node": 4 if name and name.startswith("gb") else 8}


def _engine(row: RawRow) -> str | None:
    """The engine that notes name first; of the NeMo launcher's README that of its releases, which served with FasterTransformer."""
    notes = row.notes.lower()
    if notes.startswith("fastertransformer") or (row.source.startswith("NeMo Framework Launcher")):
        return "fastertransformer"
    return next((profile for word, profile in ENGINES if re.search(word, notes)), None)
