"""What LoRA added to a LLaMA or GPT-2 model, as a folder that ``peft`` reads.

There a product stands beside each of queries, keys and values, and beside gate and up; ours is one beside all of them. So theirs have our A
each, and rows of our B.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from trainer.checkpoint.manifest import CheckpointError, read_manifest
from trainer.checkpoint.pieces import whole
from trainer.checkpoint.shards import Reader
from trainer.checkpoint.tuned import newest, tune_of
from trainer.convert.rules import Rule, rules
from trainer.spec import ConfigError, ModelConfig, ResolvedModelConfig, from_dict, resolve_model
from trainer.spec.files import write_json


def export_adapter(checkpoint: Path, target: Path) -> ResolvedModelConfig:
    """Write the folder ``target`` for ``peft.PeftModel.from_pretrained``. ``ConfigError`` if the checkpoint holds no LoRA, or ``target``
    exists."""
    found = newest(checkpoint)
    try:
        manifest = read_manifest(found)
        tune, model = tune_of(manifest), resolve_model(from_dict(ModelConfig, manifest["model"], "model."))
        if tune.method != "lora":
            raise ConfigError(f"{found.path} was tuned with tune.method={tune.method}; only lora has a form of its own there")
        tensors = dict(_factors(Reader(found.path, manifest), model))
        target.mkdir(parents=True)
        save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    except FileExistsError:
        raise ConfigError(f"{target} exists already; give another name") from None
    except (CheckpointError, OSError) as error:
        raise ConfigError(f"cannot export {checkpoint} to {target}: {error}") from None
    write_json(
        target / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None if tune.base is None else os.path.abspath(tune.base),
            "r": tune.rank,
            "lora_alpha": tune.alpha,
            "lora_dropout": tune.dropout,
            "target_modules": sorted({_suffix(name) for name in tensors}),
            "fan_in_fan_out": model.family == "gpt",
            "bias": "none",
            "inference_mode": True,
        },
    )
    return model


def _suffix(name: str) -> str:
    """The last two parts of the layer that a factor stands beside, which tell its kind in every block."""
    return ".".join(name.partition(".lora_")[0].split(".")[-2:])


def _factors(reader: Reader, model: ResolvedModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Their names and factors."""
    for rule in rules(model):
        layer, _, key = rule.ours.rpartition(".")
        if key == "weight" and f"{layer}.lora_a" in reader.stored:
            a, b = (_whole(reader, f"{layer}.lora_{factor}") for factor in "ab")
            for name, part in zip(rule.theirs, _outputs(rule, b, model)):
                place = f"base_model.model.{name.removesuffix('.weight')}"
                yield f"{place}.lora_A.weight", a.clone()
                yield f"{place}.lora_B.weight", part.contiguous()


def _outputs(rule: Rule, b: Tensor, model: ResolvedModelConfig) -> list[Tensor]:
    """B [*out, r] cut like the matrix' rows; GPT-2 keeps matrices as [in, out], but factors as they are."""
    return [part.t() if model.family == "gpt" else part for part in rule.split(b)]


def _whole(reader: Reader, name: str) -> Tensor:
    shape = reader.shapes[name]
    values = torch.empty(whole(name, shape).numel)
    reader.read(whole(name, shape), {"weight": values})
    return values.view(shape)
