"""The layout of a published row as canonical cells: what its words mean, and the usual where a cell is blank."""

from __future__ import annotations

import math
import re
from typing import Any

from benchmarks.published.raw import RawRow
from benchmarks.published.sources import Source
from benchmarks.published.tuned import tuning_of


def layout_cells(row: RawRow, source: Source) -> dict[str, Any]:
    """Cells of the layout; None where they are not known."""
    gpus = row.whole("gpus")
    fully_sharded = bool(re.search("fsdp|zero-3", row.sharding))
    tensor, pipeline = row.whole("tp") or (1 if fully_sharded else None), row.whole("pp") or (1 if fully_sharded else None)
    context = row.whole("cp") or 1
    cells: dict[str, Any] = {"gpus": gpus, "tensor": tensor, "pipeline": pipeline, "context": context, "expert": row.whole("ep") or 1}
    data = max(gpus // (tensor * pipeline * context), 1) if gpus and tensor and pipeline else None
    batch = row.whole("gbs") or (_likely_batch(row, data, fully_sharded) if data else None)
    micro_batch = row.whole("mbs") or (_likely_micro_batch(batch, data, pipeline, source) if batch and data and pipeline else None)
    tuning = tuning_of(row)
    virtual = (row.whole("virtual_pp") or (tuning and tuning.virtual_pipeline) or 1) if pipeline and pipeline > 1 else 1
    stated = row.yes("sequence_parallel")
    if stated is None and tuning:
        stated = tuning.sequence_parallel
    parallel = bool(tensor and tensor > 1 and (source.sequence_parallel if stated is None else stated))
    cells |= {"data": data, "global_batch": batch, "micro_batch": micro_batch, "virtual_pipeline": virtual, "sequence_parallel": parallel}
    cells |= {"schedule": _schedule(row, virtual) if pipeline and pipeline > 1 else "1f1b", "balance": source.balance}
    cells |= _recompute(row.text("recompute") or source.recompute)
    shards = _sharding(row, source, data, context) if data else dict.fromkeys(("params", "grads", "optimizer"))
    return cells | {f"shard_{name}": value for name, value in shards.items()}


def _likely_batch(row: RawRow, data: int, fully_sharded: bool) -> int | None:
    """Micro-batches that the notes count, or a single one where parameters are sharded: they would be gathered for each."""
    named = re.search(r"MBS=(\d+)", row.text("model"))
    size = row.whole("mbs") or (int(named.group(1)) if named else None)
    counted = re.search(r"micro_num\D{0,3}(\d+)|gradient accumulation (\d+)|(\d+) micro-?batches per step", row.notes)
    count = int(next(filter(None, counted.groups()))) if counted else int(fully_sharded)
    return size * count * data if size and count else None


def _likely_micro_batch(batch: int, data: int, pipeline: int, source: Source) -> int:
    """A pipeline wants many small micro-batches; without one a replica's share is most often a single one."""
    if pipeline > 1 and source.micro_batches == "as stages":
        return max(1, batch // (data * pipeline))
    return 1 if pipeline > 1 else max(1, min(4, batch // data))


def _schedule(row: RawRow, virtual: int) -> str:
    """The schedule that a row names, if chunks allow it; else the usual one."""
    if virtual > 1:
        return "interleaved"
    return "zero_bubble" if row.schedule.startswith("zb") else row.schedule or "1f1b"


def _recompute(words: str) -> dict[str, Any]:
    text = words.lower()
    values = {"recompute": "none", "recompute_layers": 0, "recompute_every": 1}
    if found := re.match(r"(\d+) (?:of \d+ )?(?:layers|blocks)", text):
        values |= {"recompute": "full", "recompute_layers": int(found.group(1))}
    elif found := re.match(r"every (\d+)", text):
        values |= {"recompute": "full", "recompute_every": int(found.group(1))}
    elif text.startswith("selective"):
        values["recompute"] = "selective"
    elif re.match(r"full|yes|uniform|(activation |gradient )?checkpoint", text):
        values["recompute"] = "full"
    return values


def _sharding(row: RawRow, source: Source, data: int, context: int) -> dict[str, Any]:
    """Sharding factors over data x context ranks. Numbers in words count data ranks, whose context ranks share as well: torchtitan and
    Megatron-LM shard over the groups of data and context (``dp_shard_cp``, ``dp_cp_group``)."""
    text = row.sharding or source.sharding.lower()
    if found := re.match(r"amsp p(\d+) g(\d+) os(\d+)", text):
        p, g, o = (math.gcd(int(n), data) for n in found.groups())
        return {"params": p, "grads": g, "optimizer": o}
    size = re.search(r"(?:fsdp2?|zero-3 \(\w+\)|mics\)?|hsdp\)?|hybrid.?shard\)?|\bover|\bacross|\bgroups? of)\s+(\d+)", text)
    hybrid = re.search("mics|hybrid.?shard|hsdp", text)
    named = int(size.group(1)) if size else 8 if hybrid else data
    ranks = math.gcd(named, data) * context
    if hybrid:
        return {"params": ranks, "grads": ranks, "optimizer": ranks}
    if re.search("parameters not resharded|zero-2|shard_grad_op", text):
        return {"params": 1, "grads": ranks, "optimizer": ranks}
    if re.search(r"zero-3|^fsdp|zero\+\+|full_shard", text):
        return {"params": ranks, "grads": ranks, "optimizer": ranks}
    if re.search("zero-1|^distributed optimizer", text):
        return {"params": 1, "grads": 1, "optimizer": ranks}
    return {"params": 1, "grads": 1, "optimizer": 1}
