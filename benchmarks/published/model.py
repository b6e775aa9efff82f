"""The model of a published row as canonical cells: public model cards, and the usual where a cell is blank."""

from __future__ import annotations

import math
import re
from typing import Any

from benchmarks.published.pairs import pair_cells
from benchmarks.published.raw import RawRow
from benchmarks.published.sources import Source
from benchmarks.published.tuned import tuning_of
from launcher.cost.inputs.shape import Experts, LatentAttention

EXPERTS = (
    # (name, experts, active, inner width, shared inner width, leading dense blocks, their inner width): public model cards
    (r"deepseek.?v3.*16b|deepseek.*16b", Experts(64, 6, 1408, 2816, 1), 10944),
    (r"deepseek.?(v3|r1)", Experts(256, 8, 2048, 2048, 3), 18432),
    (r"kimi", Experts(384, 8, 2048, 2048, 1), 18432),
    (r"qwen3.?_?30b", Experts(128, 8, 768), 6144),
    (r"qwen3.?_?235b", Experts(128, 8, 1536), 12288),
    (r"gpt.?oss.?120b", Experts(128, 4, 2880), 2880),
    (r"gpt.?oss.?20b", Experts(32, 4, 2880), 2880),
    (r"mixtral.?8x7b", Experts(8, 2, 14336), 14336),
    (r"mixtral.?8x22b", Experts(8, 2, 16384), 16384),
    (r"minimax.?m2", Experts(256, 8, 1536), 1536),
    (r"grok", Experts(8, 2, 32768), 32768),
)
LATENT = LatentAttention(1536, 512)
"""Multi-head latent attention of DeepSeek-V3 and Kimi-K2, by their model cards."""


def model_cells(row: RawRow, source: Source) -> dict[str, Any]:
    """Cells of the model; None where they are not known, as of architectures that the cost model does not have."""
    cells: dict[str, Any] = {name: row.whole(name) for name in ("layers", "hidden", "seq", "heads", "kv_heads", "ffn", "vocab")}
    arch = row.text("arch") or ("llama" if "llama" in row.text("model").lower() else "gpt")
    cells["family"] = {"gpt": "gpt", "llama": "llama", "moe": "llama", "t5": "t5"}.get(arch)
    hidden, llama = cells["hidden"], arch not in ("gpt", "t5")
    experts, inner = _experts(row) if arch == "moe" else (Experts(0, 0, 0), None)
    if hidden:
        cells["heads"] = cells["heads"] or likely_heads(hidden)
        cells["ffn"] = inner or cells["ffn"] or (64 * math.ceil(8 * hidden / 3 / 64) if llama else 4 * hidden)
    cells["kv_heads"] = cells["kv_heads"] or cells["heads"]
    cells["vocab"] = cells["vocab"] or source.vocab or (32000 if llama else 51200)
    latent = latent_of(row.text("model")) if arch == "moe" else LatentAttention(0, 0)
    cells["head_width"] = 128.0 if latent.query_rank else _head_width(row, hidden, cells["heads"]) if hidden else None
    tied = source.ties(cells["ffn"])
    cells["tied"] = not llama if tied is None else tied
    cells |= pair_cells(row)
    tuning = tuning_of(row)
    cells |= {
        "dropout": source.dropout and not llama,
        "adapters": "lora" in row.text("model").lower(),
        "text": tuning.text if tuning else 0,
    }
    cells |= {"adapter_rank": tuning.rank if tuning else 0, "adapter_targets": tuning.targets if tuning else ()}
    cells |= {"latent_queries": latent.query_rank, "latent_keys": latent.kv_rank}
    sizes = (experts.count, experts.active, experts.ffn, experts.shared_ffn, experts.dense_layers) if experts else (None,) * 5
    return cells | dict(zip(("experts", "experts_active", "experts_ffn", "experts_shared_ffn", "dense_layers"), sizes))


def latent_of(name: str) -> LatentAttention:
    """The latents of the mixture of experts of that name; ranks of 0 for one without."""
    return LATENT if re.search("deepseek|kimi", name, re.IGNORECASE) else LatentAttention(0, 0)


def _head_width(row: RawRow, hidden: int, heads: int) -> float:
    """Qwen3 and GPT-OSS fix the width of a head; everywhere else the heads share the hidden width."""
    if re.search("qwen3", row.text("model"), re.IGNORECASE):
        return 128
    return 64 if re.search("gpt.?oss", row.text("model"), re.IGNORECASE) else hidden / heads


def _experts(row: RawRow) -> tuple[Experts | None, int | None]:
    """The experts of a row, and the inner width of its dense MLPs; None where neither model card nor notes say."""
    for pattern, experts, ffn in EXPERTS:
        if re.search(pattern, row.text("model"), re.IGNORECASE):
            return experts, ffn
    found = re.search(r"experts (\d+), top-k (\d+), expert ffn (\d*)", row.notes)
    inner = row.whole("ffn") or 0
    if not found or not (found.group(3) or inner):
        return None, None
    return Experts(int(found.group(1)), int(found.group(2)), int(found.group(3) or inner)), inner or int(found.group(3))


def likely_heads(hidden: int) -> int:
    """A head count that divides ``hidden`` into heads of about 128."""
    divisors = [n for n in range(1, hidden // 32 + 1) if hidden % n == 0]
    return min(divisors or [1], key=lambda n: abs(math.log(hidden / n / 128)))
