"""Published measurements of inference as canonical cells: two forms, static batches with lengths, and served load with concurrency.

Widths of named models come from public model cards; what a source does not say is listed in the column ``assumed``.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from benchmarks.published.machine import GPUS
from benchmarks.published.model import EXPERTS, latent_of, likely_heads
from benchmarks.published.raw import RawRow
from launcher.tables.inference import COLUMNS
from trainer.shared.run.schema import RATED

BATCHES = ("model", "layers", "hidden", "gpu", "tp", "pp", "batch", "input_len", "output_len", "latency_ms")
"""Columns of a table of static batches."""
SERVED = ("backend", "model_path", "system", "precision", "isl", "osl", "batch_size", "tp_size", "pp_size", "silicon_tpot_ms")
"""Columns of a table of served load."""


class Card(NamedTuple):
    """Widths of a public model of the LLaMA family, or another."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool = False
    head_width: int = 128
    family: str = "llama"


CARDS = (
    (r"llama[- ]?3.*\b8b", Card(32, 4096, 32, 8, 14336, 128256)), (r"llama[- ]?3.*\b70b", Card(80, 8192, 64, 8, 28672, 128256)),
    (r"llama[- ]?3.*\b405b", Card(126, 16384, 128, 8, 53248, 128256)), (r"llama.*\b7b", Card(32, 4096, 32, 32, 11008, 32000)),
    (r"llama.*\b13b", Card(40, 5120, 40, 40, 13824, 32000)), (r"llama.*\b70b", Card(80, 8192, 64, 8, 28672, 32000)),
    (r"llama.*\b(30|33)b", Card(60, 6656, 52, 52, 17920, 32000)), (r"llama.*\b65b", Card(80, 8192, 64, 64, 22016, 32000)),
    (r"mistral.*\b7b", Card(32, 4096, 32, 8, 14336, 32000)), (r"aquila-7b", Card(32, 4096, 32, 32, 11008, 100008)),
    (r"qwen3-32b", Card(64, 5120, 64, 8, 25600, 151936)), (r"qwen3-14b", Card(40, 5120, 40, 8, 17408, 151936)),
    (r"qwen3-8b", Card(36, 4096, 32, 8, 12288, 151936)), (r"qwen2(\.5)?-72b", Card(80, 8192, 64, 8, 29568, 152064)),
    (r"qwen2\.5-32b", Card(64, 5120, 40, 8, 27648, 152064)), (r"qwen2(\.5)?-7b", Card(28, 3584, 28, 4, 18944, 152064)),
    (r"qwen1\.5-7b", Card(32, 4096, 32, 32, 11008, 151936)), (r"opt-6\.7b", Card(32, 4096, 32, 32, 16384, 50272, True, family="gpt")),
    (r"gpt-j.*\b6b", Card(28, 4096, 16, 16, 16384, 50400, head_width=256, family="gpt")),
    (r"bloom-7b1", Card(30, 4096, 32, 32, 16384, 250880, True, family="gpt")),
    (r"bloom.*\b176b", Card(70, 14336, 112, 112, 57344, 250880, True, family="gpt")),
    (r"neox.*\b20b", Card(44, 6144, 64, 64, 24576, 50432, head_width=96, family="gpt")),
    (r"falcon.*\b40b", Card(60, 8192, 128, 8, 32768, 65024, head_width=64, family="gpt")),
    (r"falcon.*\b180b", Card(80, 14848, 232, 8, 59392, 65024, head_width=64, family="gpt")),
)  # fmt: skip
MIXTURES = (
    (r"mixtral.?8x7b", Card(32, 4096, 32, 8, 14336, 32000)), (r"mixtral.?8x22b", Card(56, 6144, 48, 8, 16384, 32768)),
    (r"qwen3.?30b", Card(48, 2048, 32, 4, 6144, 151936)), (r"qwen3.?235b", Card(94, 4096, 64, 4, 12288, 151936)),
    (r"minimax.?m2", Card(62, 3072, 48, 8, 1536, 200064)), (r"deepseek.?(v3|r1)", Card(61, 7168, 128, 128, 18432, 129280)),
)  # fmt: skip
"""Those of mixtures of experts, whose experts are in ``benchmarks.published.model``."""
UNKNOWN_MIXTURES = r"moe|\d+x\d+b|-a\d+b"
"""Names of others, some of which have the name of a plain model in theirs."""
ENGINES = ((r"trt-?llm|tensorrt", "tensorrt_llm"), (r"vllm", "vllm"), (r"sglang", "sglang"))
RELEASE = r"(?:trt-?llm|tensorrt-llm|vllm|sglang)\b.*?\bv?(\d+\.\d+[\w.]*)"
"""The first release behind an engine's name."""
PAGES = (("docs/source/performance.md", "0.6"),)
"""Pages that have other names since."""
TOKENS = r"(generated |output |out )?tok(en)?s?( ?/ ?| per )s(ec(ond)?)?"
"""Units of a rate of generated tokens."""
OF_MODEL_OPTIMIZER = ("fp8", "nvfp4")
"""Products of quantised checkpoints that TensorRT-LLM runs: NVIDIA's Model Optimizer writes them, unless told otherwise, with keys and
values of 8 bits (``examples/llm_ptq/hf_ptq.py``, ``--kv_cache_qformat``), and the engine follows the checkpoint. Checkpoints with scales of
blocks come from the models' makers and say nothing of keys and values."""
DOUBTED = r"superseded|inconsistent|do not agree|suspiciously|misprint"
"""Words of notes that take a measurement back."""


def of_batches(row: RawRow) -> dict[str, Any]:
    """Cells of a row of static batches."""
    card = _card(row.text("model"))
    cells = _blank(row) | (card._asdict() | _mixture(row.text("model")) if card else _model(row)) | _machine(row.text("gpu"))
    cells |= {"tensor": row.whole("tp"), "pipeline": row.whole("pp"), "batch": row.whole("batch"), "replicas": 1, "mode": "static"}
    cells |= {"input": row.number_of("input_len"), "output": row.number_of("output_len")}
    engine, assumed = _engine(row), {"kv": "as the weights", "gpus_per_node": "usual"}
    stated = re.search(r"\b(fp8|fp4|bf16|fp16)\b", row.notes.lower())
    weights = None if not engine or re.search("int8|int4|fp32", row.notes) else stated.group(1) if stated else "fp16"
    kv = "fp8" if weights == "fp4" else weights  # TensorRT-LLM's checkpoints of 4 bits have keys and values of 8
    rate, printed = _tokens(row), row.number_of("latency_ms")
    made = None if rate is None or not (cells["batch"] and cells["output"]) else 1e3 * cells["batch"] * cells["output"] / rate
    measured = None if re.search(DOUBTED, row.notes) else printed or made
    out = bool(re.search(r"\boom\b", row.notes, re.IGNORECASE))
    oom = True if out else False if printed or rate else None
    cells |= {
        "engine": engine,
        "engine_version": _version(f"{row.source} {row.notes}"),
        "weights": weights,
        "kv": kv,
        "latency_ms": measured,
        "oom": oom,
    }
    if rate and cells["batch"] is None and cells["engine"] and not re.search(DOUBTED, row.notes):
        cells |= {"mode": "closed", "tokens_per_s": rate}
        assumed["mode"] = "a rate without a batch is that of as many requests as run at once"
    if cells["heads"]:
        assumed |= dict.fromkeys(
            ("heads", "kv_heads", "head_width", "ffn", "vocab", "tied"), "model card" if card else "usual of the family"
        )
    if card:
        assumed |= {name: "model card" for name in ("layers", "hidden") if not row.text(name)}
    if engine and not row.notes.lower().startswith("fastertransformer"):
        assumed |= {"engine": "the source's release"} | ({} if stated else {"weights": "usual"})
    if made and measured and not printed:
        assumed["latency_ms"] = "batch and length over the rate"
    if measured is None and printed:
        assumed["latency_ms"] = "left out: the source takes it back or contradicts it"
    return _done(cells, assumed)


def of_served(row: RawRow) -> dict[str, Any]:
    """Cells of a row of served load."""
    name, precision = row.text("model_path"), row.text("precision")
    card = _card(name)
    cells = _blank(row) | _machine(row.text("system")) | {"source": "served load", "model": name or None}
    if card is not None:
        cells |= card._asdict() | _mixture(name)
    if (row.whole("moe_ep_size") or 1) > 1 or (row.whole("attention_dp_size") or 1) > 1:
        cells["family"] = None  # whole experts, or attention of a layout of its own
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
    }
    cells["engine"] = _engine_of(row.text("backend"))
    cells["engine_version"] = _version(f"{row.text('backend')} {row.text('backend_version')}")
    quantised = cells["engine"] == "tensorrt_llm" and row.text("gemm_quant_mode") in OF_MODEL_OPTIMIZER
    cells["kv"] = "fp8" if quantised else "bf16"
    cells |= {"ttft_ms": row.number_of("silicon_ttft_ms"), "tpot_ms": row.number_of("silicon_tpot_ms"), "oom": False}
    cards = ("family", "layers", "hidden", "heads", "kv_heads", "head_width", "ffn", "vocab", "tied")
    assumed = dict.fromkeys(cards if card else (), "model card") | {"gpus_per_node": "usual"}
    assumed["kv"] = "usual of the engine's checkpoints" if quantised else "usual of the engine"
    return _done(cells, assumed | ({} if precision else {"weights": "usual where blank"}))


def _card(name: str) -> Card | None:
    """The model that a name says; None where it says none that is known."""
    mixture = next((card for pattern, card in MIXTURES if re.search(pattern, name, re.IGNORECASE)), None)
    if mixture or re.search(UNKNOWN_MIXTURES, name, re.IGNORECASE):
        return mixture
    return next((card for pattern, card in CARDS if re.search(pattern, name, re.IGNORECASE)), None)


def _mixture(name: str) -> dict[str, Any]:
    """Cells of the experts and latents of the model that a name says."""
    experts, latent = next((known for pattern, known, _ in EXPERTS if re.search(pattern, name, re.IGNORECASE)), None), latent_of(name)
    cells = {"latent_queries": latent.query_rank, "latent_keys": latent.kv_rank}
    sizes = (experts.count, experts.active, experts.ffn, experts.shared_ffn, experts.dense_layers) if experts else (0,) * 5
    return cells | dict(zip(("experts", "experts_active", "experts_ffn", "experts_shared_ffn", "dense_layers"), sizes))


def _tokens(row: RawRow) -> float | None:
    """Generated tokens per second over all devices; None where the source does not tell, or not of what."""
    rate, unit = row.number_of("throughput"), re.sub(r"[()]", "", row.text("unit").lower())
    found = re.fullmatch(rf"{TOKENS}(?P<each>( per | ?/) ?(gpu|device))?", unit)
    if rate is None or found is None:
        return None
    return rate * ((row.whole("tp") or 1) * (row.whole("pp") or 1) if found["each"] else 1)


def _blank(row: RawRow) -> dict[str, Any]:
    return dict.fromkeys(COLUMNS) | _mixture("") | {"source": row.source or None, "model": row.text("model") or None}


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
    return _engine_of(f"{row.source} {notes}")


def _version(words: str) -> str | None:
    if found := re.search(RELEASE, words.lower()):
        return found[1].rstrip(".")
    return next((release for page, release in PAGES if page in words), None)


def _engine_of(words: str) -> str | None:
    return next((profile for pattern, profile in ENGINES if re.search(pattern, words.lower())), None)
