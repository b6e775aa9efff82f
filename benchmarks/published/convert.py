"""From rows as they were published to canonical ones, with every assumption listed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.published import inference
from benchmarks.published.layout import layout_cells
from benchmarks.published.machine import machine_cells
from benchmarks.published.model import model_cells
from benchmarks.published.pairs import recipe_cells
from benchmarks.published.raw import RawRow, read
from benchmarks.published.sources import Source, source_of
from benchmarks.published.step_time import step_seconds
from benchmarks.published.tuned import tuning_of
from launcher.cost.inputs.shape import Shape
from launcher.tables.canonical import COLUMNS, MeasuredRun, TableColumn, Unanswerable, header, written
from launcher.tables.cases import shape_of
from launcher.tables.inference import COLUMNS as REQUESTS

STATED_BY = {
    "heads": "heads", "kv_heads": "kv_heads", "vocab": "vocab", "ffn": "ffn", "family": "arch", "tensor": "tp", "pipeline": "pp",
    "virtual_pipeline": "virtual_pp", "context": "cp", "expert": "ep", "micro_batch": "mbs", "global_batch": "gbs",
    "sequence_parallel": "sequence_parallel", "recompute": "recompute", "gpus_per_node": "nodes", "precision": "precision",
    "shard_params": "zero_stage_or_sharding", "shard_grads": "zero_stage_or_sharding", "shard_optimizer": "zero_stage_or_sharding",
}  # fmt: skip
"""Columns that are assumed where the published column is blank."""
FROM_RECIPES = {name: name for name in ("layers", "hidden", "seq")}
"""Further columns that a recipe fills."""
BY_NAME = ("experts", "experts_active", "experts_ffn", "experts_shared_ffn", "dense_layers", "latent_queries", "latent_keys")
"""Columns of mixtures of experts: from public model cards, by the model's name."""


def converted(path: str | Path) -> tuple[list[dict[str, Any]], Mapping[str, TableColumn]]:
    """The canonical rows of a raw table of any of the three forms, told apart by their columns, and what those are. ``ConfigError`` where
    it cannot be read."""
    names = set(header(path))
    for form, cells in ((inference.SERVED, inference.of_served), (inference.BATCHES, inference.of_batches)):
        if {form[0], form[-1], form[-4]} <= names:
            return [cells(row) for row in read(path, form)], REQUESTS
    return [canonical(row) for row in read(path)], COLUMNS


def canonical(row: RawRow) -> dict[str, Any]:
    """The canonical cells of a row."""
    printed, row = row, row.filled(recipe_cells(row))
    source = source_of(row)
    cells: dict[str, Any] = {"source": row.source or None, "model": row.text("model") or None}
    cells |= model_cells(row, source) | machine_cells(row) | layout_cells(row, source)
    cells |= {"trainer": source.trainer, "trainer_changes": _changes(source.changes), "precision": precision_of(row)}
    seconds, made_of = step_seconds(row, _shape(cells))
    peak = row.number_of("peak_mem_gb")
    cells |= {"step_time_s": seconds, "peak_memory_gb": peak, "memory_counts": source.reports, "oom": row.yes("oom")}
    assumed = assumptions(printed, source, cells) | ({"step_time_s": made_of} if made_of else {})
    cells["assumed"] = "; ".join(f"{name} ({why})" for name, why in assumed.items()) or "none"
    return {name: cells[name] for name in COLUMNS}


def assumptions(row: RawRow, source: Source, cells: Mapping[str, Any]) -> dict[str, str]:
    """What a row does not say itself, and where it comes from."""
    found = {name: "usual" for name, raw in STATED_BY.items() if not row.text(raw) and cells[name] is not None}
    if "recompute" in found and source.recompute:
        found["recompute"] = "usual of the source"
    if "vocab" in found and source.vocab:
        found["vocab"] = "usual of the source"
    for name, said in {"tied": source.ties(cells["ffn"]), "dropout": source.dropout}.items():
        found[name] = "usual of the source" if said is not None else "usual of the family"
    found |= {name: "the source's recipe" for name, raw in (FROM_RECIPES | STATED_BY).items() if raw in recipe_cells(row)}
    if row.text("arch") == "moe":
        found |= {name: "model card, or notes" for name in (*BY_NAME, "ffn", "head_width") if cells[name]}
    if tuning := tuning_of(row):
        found |= {name: "the source's recipe" for name in ("adapter_rank", "adapter_targets", "text") if cells[name]}
        given = {"virtual_pipeline": tuning.virtual_pipeline, "sequence_parallel": tuning.sequence_parallel}
        found |= {name: "the source's recipe" for name, value in given.items() if name in found and value is not None}
    found["trainer"] = "by source and year"
    if source.changes:
        found["trainer_changes"] = "by model, notes, precision, container"
    if cells["pipeline"] and cells["pipeline"] > 1:
        found |= dict.fromkeys(("schedule", "balance"), "by model, table and notes")
    found |= {name: "by name of the GPU" for name in ("memory_gb", "memory_bandwidth_gbs") if cells[name]}
    links = ("link_gbs", "link_domain", "network_gbs", "network_latency_us")
    return found | {name: "words of the interconnect" for name in links if cells[name]}


def precision_of(row: RawRow) -> str:
    """The number format of the matrix products."""
    text = row.text("precision").lower()
    for name in ("fp4", "fp8"):
        if name in text:
            return name
    if "fp16" in text and "bf16" not in text:
        return "fp16"
    if text == "fp32":
        return "fp32"
    return "fp16" if row.text("gpu").startswith("V100") else "bf16"


def _changes(changes: Mapping[str, object]) -> str:
    words = {name: str(value).lower() if isinstance(value, bool) else value for name, value in changes.items()}
    return " ".join(f"{name}={value}" for name, value in words.items()) or "none"


def _shape(cells: Mapping[str, Any]) -> Shape | None:
    try:
        return shape_of(MeasuredRun(0, {name: COLUMNS[name].read(written(value)) for name, value in cells.items()}))
    except Unanswerable:
        return None
