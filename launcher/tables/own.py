"""Trials of this project's own trainer as rows of a canonical table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.config.schema import ClusterConfig, HardwareConfig
from launcher.config.trainers import OWN, profile
from launcher.cost.inputs.device import Device
from launcher.cost.inputs.shape import CHOSEN, Shape
from launcher.cost.prediction import as_run
from launcher.tables.canonical import COLUMNS, written
from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import LayoutConfig, ModelConfig, TrainConfig

ORDER = LayoutConfig().order


def own_row(
    source: str, config: TrainConfig, cluster: ClusterConfig, hardware: Mapping[str, HardwareConfig], measured: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns one trial as a row; ``measured`` has ``step_time_s``, ``peak_memory_gb`` and ``oom``. An explicit split, an order of ranks,
    slices, parts of experts or offloaded states, which canonical columns lack, leave ``balance`` unknown. ``ConfigError`` for a run with
    phases."""
    if config.run.phases:
        raise ConfigError("run.phases gives it steps of several sizes, and a row of a table is of one")
    shape, layout = Shape.of(config.model), config.layout
    name = next((stem for stem, device in hardware.items() if device.name == cluster.hardware.name), cluster.hardware.name)
    lacking = layout.slices > 1 or layout.expert_tensor > 1 or layout.sharding.offload
    plain = layout.stage_layers is None and layout.order == ORDER and not lacking
    lora = config.tune.method == "lora"
    cells: dict[str, Any] = dict.fromkeys(COLUMNS) | {
        "source": source,
        "model": f"{config.model.family} {shape.parameters / 1e9:.3g}B",
        **{key: getattr(config.model, key) for key in ("family", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "tied")},
        **dict.fromkeys(("experts", "experts_active", "experts_ffn", "experts_shared_ffn", "dense_layers"), 0),
        **dict.fromkeys(("latent_queries", "latent_keys"), 0),
        **{key: getattr(layout, key) for key in ("tensor", "pipeline", "virtual_pipeline", "data", "context", "expert")},
        **{key: getattr(layout, key) for key in ("micro_batch", "schedule", "sequence_parallel", "recompute", "recompute_every")},
        **{f"shard_{key}": getattr(layout.sharding, key) for key in ("params", "grads", "optimizer")},
        "encoder_layers": shape.encoder_layers,
        "decoder_seq": shape.decoder_seq,
        "model_changes": _choices(config.model),
        "head_width": float(shape.head_width),
        "dropout": shape.dropout,
        "adapters": config.tune.method != "full",
        "adapter_rank": config.tune.rank if lora else 0,
        "adapter_targets": tuple(config.tune.targets) if lora else (),
        "text": 0,  # its kernel computes all scores of a row and masks those of other texts
        "hardware": name,
        "gpus": layout.tensor * layout.pipeline * layout.context * (layout.data or 1),
        "gpus_per_node": cluster.gpus_per_node,
        "trainer": OWN,
        "trainer_changes": _changes(config, cluster),
        "global_batch": config.run.global_batch,
        "balance": layout.balance if plain else None,
        "recompute_layers": layout.recompute_layers or 0,
        "precision": config.run.precision,
        "memory_counts": "allocated",
        "assumed": "none",
        **measured,
    }
    if layout.recompute_layers == 0:
        cells["recompute"] = "none"
    return cells


def _choices(model: ModelConfig) -> str:
    """Names the choices in which a model differs from its family."""
    chosen = {name: getattr(resolve_model(model), name) for name in CHOSEN}
    others = {name: value for name, value in chosen.items() if value != FAMILIES[model.family].default(name)}
    words = {name: f"[{','.join(value)}]" if isinstance(value, list) else value for name, value in others.items()}
    return " ".join(f"{name}={value}" for name, value in words.items()) or "none"


def _changes(config: TrainConfig, cluster: ClusterConfig) -> str:
    changes = ["kernels.attention=unfused"] if config.model.attention == "unfused" else []
    if cluster.hardware.peak_tflops:
        ran = as_run(profile(OWN), config.run, Device.of(cluster.hardware, cluster.gpus_per_node), config.optimizer)
        changes += [f"kernels.pointwise={ran.kernels.pointwise}", f"kernels.fused_loss={str(ran.kernels.fused_loss).lower()}"]
        changes.append(f"memory.bucket_bytes={written(ran.memory.bucket_bytes)}")
        if config.run.moments == "bf16":
            changes.append(f"numbers.optimizer_bytes={written(ran.numbers.optimizer_bytes)}")
        if ran.numbers.averages_weights:
            changes.append("numbers.averages_weights=true")
        if ran.numbers.orthogonal_steps:
            changes.append(f"numbers.orthogonal_steps={ran.numbers.orthogonal_steps}")
        if ran.numbers.orthogonal_rows:
            changes.append("numbers.orthogonal_rows=true")
        if config.run.async_tensor:
            changes.append(f"overlap.tensor={ran.overlap.tensor}")
    return " ".join(changes) or "none"
