"""Turns a row of a table into inputs of the cost model, or the reason why it cannot be predicted."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from launcher.config.schema import ClusterConfig, HardwareConfig
from launcher.config.trainer import TrainerProfile
from launcher.config.trainers import changed, profile
from launcher.config.yaml_text import read_yaml
from launcher.cost.inputs.constants import Constants
from launcher.cost.inputs.device import Device
from launcher.cost.inputs.layouts import BALANCES, LAYOUT_DTYPE
from launcher.cost.inputs.shape import CHOSEN, SIZES, Experts, LatentAttention, Shape, family_traits
from launcher.cost.known import cells_of
from launcher.cost.prediction import CostModel, as_run
from launcher.tables.canonical import UNKNOWN, MeasuredRun, Unanswerable
from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.errors import ConfigError, nearest
from trainer.shared.run.read import from_dict
from trainer.shared.run.schema import RECOMPUTE, SCHEDULES, ModelConfig, RunConfig

LAYOUT = ("tensor", "pipeline", "virtual_pipeline", "data", "context", "expert", "micro_batch", "sequence_parallel", "recompute_every")
SHARDS = ("params", "grads", "optimizer")


@dataclass(frozen=True)
class TableCase:
    """All that the cost model needs for one row."""

    row: MeasuredRun
    shape: Shape
    layout: np.void
    global_batch: int
    device: Device
    constants: Constants
    precision: str
    trainer: TrainerProfile


def table_case(row: MeasuredRun, hardware: dict[str, HardwareConfig], trainer: TrainerProfile | None = None) -> TableCase:
    """Returns the case of ``row``; ``trainer`` replaces its own. Raises ``Unanswerable`` with the reason if it cannot be predicted."""
    shape, layout = shape_of(row), layout_of(row)
    _check(row, shape, layout)
    machine = machine_of(row, hardware)
    trainer = trainer or trainer_of(row, machine.device)
    return TableCase(row, shape, layout, row.known("global_batch"), machine.device, machine.constants, row.known("precision"), trainer)


def asked_cells(case: TableCase) -> dict[str, Any]:
    """Returns the quantities in which distances between runs are measured."""
    words = {"precision": case.precision, "trainer": case.trainer.name}
    return words | cells_of(case.device, case.shape, case.layout, case.row["gpus"])


def _check(row: MeasuredRun, shape: Shape, layout: np.void) -> None:
    """Refuses layouts that no trainer can run. Embedding and head may count as blocks where stages have several chunks."""
    chunks = int(layout["pipeline"]) * int(layout["virtual_pipeline"])
    ranks = int(layout["tensor"]) * int(layout["pipeline"]) * int(layout["context"]) * int(layout["data"])
    if ranks != row.known("gpus"):
        raise Unanswerable("degrees do not multiply to the number of GPUs")
    if row.known("global_batch") < layout["micro_batch"] * layout["data"]:
        raise Unanswerable("batch too small for the replicas")
    if layout["pipeline"] > shape.layers or chunks > shape.layers + 2:
        raise Unanswerable("more stages than layers")
    if "heads" not in row.assumed and shape.heads % layout["tensor"]:
        raise Unanswerable("tensor degree does not divide the heads")
    if shape.experts is not None and layout["expert"] > min(shape.experts.count, layout["data"] * layout["context"] * layout["tensor"]):
        raise Unanswerable("more expert ranks than experts or replicas")
    if shape.heads % shape.kv_heads:
        raise Unanswerable("kv_heads do not divide the heads")
    if shape.experts is not None and not 1 <= shape.experts.active <= shape.experts.count:
        raise Unanswerable("tokens visit more experts than there are, or none")
    if shape.experts is not None and shape.experts.dense_layers > shape.layers:
        raise Unanswerable("more dense layers than layers")
    if shape.text > shape.seq:
        raise Unanswerable("texts are longer than the sequence")
    shards = [*(int(layout[name]) for name in SHARDS), int(layout["data"]) * int(layout["context"])]
    if any(after % before for before, after in itertools.pairwise(shards)):
        raise Unanswerable("shards of parameters, gradients, optimizer state and replicas do not divide each other, in this order")


def shape_of(row: MeasuredRun) -> Shape:
    """The model of a row. Raises ``Unanswerable`` where it is not known, ``ConfigError`` for a wrong change."""
    experts, latent = mixture_of(row)
    sizes = {name: row.known(name) for name in SIZES}
    shape = Shape(
        **sizes,
        **family_traits(_configured(row)),
        inner_dropout=row.known("dropout") and row.known("encoder_layers") > 0,
        tied=row.known("tied"),
        dropout=row.known("dropout"),
        text=row.known("text"),
        frozen=row.known("adapters"),
        adapted=tuple(row.known("adapter_targets")),
        rank=row.known("adapter_rank"),
        experts=experts,
        latent=latent,
    )
    return dataclasses.replace(shape, added=shape.low_rank_parameters)


def mixture_of(row: MeasuredRun) -> tuple[Experts | None, LatentAttention | None]:
    """Returns a row's experts and latents; None for what its model has not. Raises ``Unanswerable`` where that is not known."""
    experts = Experts(*map(row.known, ("experts", "experts_active", "experts_ffn", "experts_shared_ffn", "dense_layers")))
    latent = LatentAttention(row.known("latent_queries"), row.known("latent_keys"))
    return experts if experts.count else None, latent if latent.query_rank else None


def _configured(row: MeasuredRun) -> ModelConfig:
    """Family, stacks and choices of a row's model."""
    keys: dict[str, Any] = {name: row.known(name) for name in ("family", "layers", "seq", "encoder_layers", "decoder_seq")}
    if not keys["encoder_layers"] < keys["layers"]:
        raise Unanswerable("no block is left behind the encoder")
    if {FAMILIES[keys["family"]].encoder_decoder} != {keys["encoder_layers"] > 0, keys["decoder_seq"] > 0}:
        raise Unanswerable("encoder_layers and decoder_seq are above 0 for an encoder and its decoder, and for nothing else")
    try:
        changes = changes_of(row["model_changes"] or "none", "model_changes")
        if unknown := next((name for name in changes if name not in CHOSEN), None):
            raise ConfigError(f"unknown key model_changes: model.{unknown}{nearest(unknown, CHOSEN)} (known: {', '.join(CHOSEN)})")
        return from_dict(ModelConfig, keys | changes, "model_changes: model.")
    except ConfigError as error:
        raise ConfigError(f"row {row.number}: {error}") from None


def layout_of(row: MeasuredRun) -> np.void:
    """The layout of a row as a record."""
    values: dict[str, Any] = {name: row.known(name) for name in LAYOUT}
    values |= {name: row.known(f"shard_{name}") for name in SHARDS}
    values["schedule"] = SCHEDULES.index(row.known("schedule"))
    values["recompute"] = RECOMPUTE.index(row.known("recompute"))
    values["balance"] = BALANCES.index(row.known("balance"))
    values["slices"] = values["expert_tensor"] = 1
    values["recompute_layers"] = row.known("recompute_layers") or -1
    record = np.zeros(1, LAYOUT_DTYPE)[0]
    for name, value in values.items():
        record[name] = value
    return record


def machine_of(row: MeasuredRun, hardware: dict[str, HardwareConfig]) -> CostModel:
    """Returns the cost model of a row's machine: its hardware file, with the row's memory and links."""
    name = row.known("hardware")
    if name not in hardware:
        raise Unanswerable(f"no hardware file {name}")
    cells = ("memory_gb", "memory_bandwidth_gbs", "link_gbs", "link_domain", "network_gbs", "network_latency_us")
    changes = {cell: row[cell] for cell in cells if row[cell] is not None}
    config = dataclasses.replace(hardware[name], **changes)
    cluster = ClusterConfig(gpus_per_node=row.known("gpus_per_node"), hardware=config)
    if dataclasses.replace(cluster, nodes=-(-row.known("gpus") // cluster.gpus_per_node)).network_unknown:
        raise Unanswerable("network_gbs is not known")
    return CostModel(cluster)


def trainer_of(row: MeasuredRun, device: Device) -> TrainerProfile:
    """Returns the profile of a row's trainer with the row's changes. Raises ``ConfigError`` for an unknown profile or a wrong change."""
    base = as_run(profile(row["trainer"] or UNKNOWN), RunConfig(), device)
    try:
        return _changed(base, row["trainer_changes"] or "none")
    except ConfigError as error:
        raise ConfigError(f"row {row.number}: {error}") from None


@cache
def _changed(base: TrainerProfile, words: str) -> TrainerProfile:
    changes = changes_of(words, "trainer_changes")
    return changed(base, changes, "trainer_changes: trainer.") if changes else base


def changes_of(words: str, column: str) -> dict[str, Any]:
    """``overlap.tensor=all overlap.gradients=false`` as keys and values, ``none`` as no keys. ``ConfigError`` for a value that cannot be
    read."""
    named = () if words == "none" else words.split()
    return {name: _value(column, name, value) for name, _, value in (word.partition("=") for word in named)}


def _value(column: str, name: str, text: str) -> Any:
    import yaml

    try:
        if not text:
            raise ValueError(name)
        return read_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(
            f"{column} has {name}={text}, whose value cannot be read; write keys as in overlap.gradients=false, with blanks between them "
            "alone, or none"
        ) from None
