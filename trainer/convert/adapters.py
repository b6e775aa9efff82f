"""LoRA factors of a LLaMA or GPT-2 model, as a folder that ``peft`` reads and writes.

``peft`` has a pair of factors for each of queries, keys and values, and for gate and up; ours has one pair for the fused matrix. On export
each of theirs gets our A and its rows of our B. On import our A stacks the rows of all distinct A of theirs, and our B is zero outside the
columns of each one's own A: the same function, with up to three times the rank.
"""

from __future__ import annotations

import json
import math
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trainer.checkpoint.folder import Folder
from trainer.checkpoint.pieces import whole
from trainer.checkpoint.shards import PieceSnapshot, Reader, write_rank
from trainer.checkpoint.tuned import tune_of
from trainer.convert.huggingface import placed, save_tensors, shapes
from trainer.convert.rules import Rule, rules
from trainer.shared.families.registry import FAMILIES
from trainer.shared.records.manifest import CheckpointError, read_manifest
from trainer.shared.records.resume import base_identity, newest, section
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import write_json
from trainer.shared.run.read import from_dict
from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import TARGETS, ModelConfig, TuneConfig
from trainer.shared.run.tuning import check_tune


def export_adapter(checkpoint: Path, target: Path) -> ResolvedModelConfig:
    """Writes the folder ``target`` for ``peft.PeftModel.from_pretrained``. ``ConfigError``, with nothing left behind, if the checkpoint
    holds no LoRA or ``target`` exists."""
    found = newest(checkpoint)
    try:
        manifest = read_manifest(found)
        tune, model = tune_of(manifest), resolve_model(from_dict(ModelConfig, manifest["model"], "model."))
        if tune.method != "lora":
            raise ConfigError(f"{found.path} was tuned with tune.method={tune.method}; only lora has a form of its own there")
        tensors = dict(_factors(Reader(found.path, manifest), model))
        with placed(target) as work:
            work.mkdir()
            save_tensors(tensors, work / "adapter_model.safetensors")
            write_json(work / "adapter_config.json", _config(tune, model, tensors))
    except (CheckpointError, OSError) as error:
        raise ConfigError(f"cannot export {checkpoint} to {target}: {error}") from None
    return model


def _config(tune: TuneConfig, model: ResolvedModelConfig, factors: Iterable[str]) -> dict[str, Any]:
    """Builds ``adapter_config.json`` from the names of the factors."""
    return {
        "peft_type": "LORA",
        "task_type": None if model.encoder_layers else "CAUSAL_LM",  # its class of the former wants what transformers 5 has not
        "base_model_name_or_path": None if tune.base is None else os.path.abspath(tune.base),
        "r": tune.rank,
        "lora_alpha": tune.alpha,
        "lora_dropout": tune.dropout,
        "target_modules": sorted({_suffix(name) for name in factors}),
        "fan_in_fan_out": FAMILIES[model.family].hub.inputs_first,
        "bias": "none",
        "inference_mode": True,
    }


def import_adapter(source: Path, target: Path, base: Path) -> ResolvedModelConfig:
    """Writes the adapter in ``source``, for the checkpoint in ``base``, as a checkpoint in the folder ``target``. ``ConfigError``, with
    nothing left behind, if it cannot be read or is not a plain LoRA of this model, or if ``target`` exists."""
    below = newest(base)
    try:
        config = json.loads((source / "adapter_config.json").read_text())
        if not isinstance(config, dict):
            raise ValueError("adapter_config.json is not a JSON object")
        alpha = float(config["lora_alpha"])
        if not 0 < alpha < math.inf:
            raise ConfigError(f"{source}: lora_alpha={alpha:g} cannot be imported; the product is scaled by a number above 0")
        tensors = load_file(source / "adapter_model.safetensors")
        manifest = read_manifest(below)
        if manifest.get("tune"):
            raise ConfigError(f"--base={base} holds what a tuning added, which cannot be a base; give the one it was tuned from")
        model = resolve_model(from_dict(ModelConfig, manifest["model"], "model."))
        rank, factors = _joined(_checked(source, config, tensors), model, int(config["r"]))
        tune = TuneConfig("lora", os.path.abspath(base), sorted({target_of(name) for name in factors}, key=TARGETS.index), rank)
        tune.alpha = alpha * rank / int(config["r"])
        check_tune(tune, model)
        pieces = [PieceSnapshot(whole(name, values.shape), {"weight": values.flatten()}) for name, values in factors.items()]
        facts = {"model": asdict(model), "data": None, "extra": {"samples": 0, "updates": 0}}
        with placed(target) as work:
            folder = Folder(work, run="import", attempt=0, token=uuid.uuid4().hex[:12])
            folder.enter()
            write_rank(folder.workspace(0), 0, pieces)
            folder.commit(0, 1, facts | {"tune": section(tune, base_identity(tune, 0))}, timeout_s=60)
    except (CheckpointError, OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot import {source} to {target}: {error}; give a folder that peft has saved") from None
    return model


def _checked(source: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns their factors by the name of the matrix with ``.A`` or ``.B`` appended. ``ConfigError`` for unsupported LoRA features."""
    for name, value in {"peft_type": "LORA", "use_dora": False, "use_rslora": False, "bias": "none"}.items():
        if config.get(name, value) != value:
            raise ConfigError(f"{source}: {name}={config[name]!r} cannot be imported; only {value!r} is trained here")
    if odd := [name for name in ("rank_pattern", "alpha_pattern", "modules_to_save") if config.get(name)]:
        raise ConfigError(
            f"{source}: {odd[0]}={config[odd[0]]!r} cannot be imported; all matrices must have one rank, and nothing else weights"
        )
    return {_FACTOR.sub(r".\1", name.removeprefix("base_model.model.")): values.float() for name, values in tensors.items()}


_FACTOR = re.compile(r"\.lora_([AB])\.weight$")


def _joined(theirs: dict[str, Tensor], model: ResolvedModelConfig, r: int) -> tuple[int, dict[str, Tensor]]:
    """Returns the rank that our factors need, and our factors by name. ``ConfigError`` for a factor that matches no parameter."""
    expected, parts = shapes(model), {}
    for rule in _as_kept(model):
        names = [name.removesuffix(".weight") for name in rule.theirs]
        if any(f"{name}.A" in theirs for name in names):
            parts[rule] = [(theirs.pop(f"{name}.A", None), theirs.pop(f"{name}.B", None)) for name in names]
    if theirs or not parts:
        raise ConfigError(f"no place for {next(iter(theirs), 'an adapter without factors')}; this adapter is of another model")
    for rule, pairs in parts.items():
        _check_factors(rule, pairs, expected[rule.ours], r)
    different = {rule: _different([a for a, _ in pairs if a is not None]) for rule, pairs in parts.items()}
    rank, found = r * max(map(len, different.values())), {}
    for rule, pairs in parts.items():
        layer, shape = rule.ours.removesuffix(".weight"), (*expected[rule.ours][:-1], rank)
        stacked = torch.cat(different[rule])
        found[f"{layer}.lora_a"] = torch.cat((stacked, stacked.new_zeros(rank - len(stacked), stacked.shape[1])))
        found[f"{layer}.lora_b"] = rule.join(list(_widened(rule, pairs, different[rule], shape)), shape).contiguous()
    return rank, found


def _as_kept(model: ResolvedModelConfig) -> Iterator[Rule]:
    """Yields the rules of factors, which are [out, r] even if matrices are [in, out]."""
    return (replace(rule, inputs_first=False) for rule in rules(model))


def _check_factors(rule: Rule, pairs: list[tuple[Tensor | None, Tensor | None]], shape: tuple[int, ...], r: int) -> None:
    """Raises ``ConfigError`` for factors that are not A [r, in] and B [out, r] of our matrix of this ``shape``."""
    for name, pair, empty in zip(rule.theirs, pairs, rule.split(torch.zeros((*shape[:-1], r)))):
        wanted = [[r, shape[-1]], [empty.shape[0], r]]
        found = [None if factor is None else list(factor.shape) for factor in pair]
        if found not in (wanted, [None, None]):
            raise ConfigError(
                f"factors of {name.removesuffix('.weight')} are A {found[0]} and B {found[1]}, and this base takes {wanted[0]} and "
                f"{wanted[1]} (r={r}); this adapter is of another model"
            )


def _different(factors: list[Tensor]) -> list[Tensor]:
    """Removes duplicates from ``factors``."""
    found: list[Tensor] = []
    for a in factors:
        if not any(torch.equal(a, known) for known in found):
            found.append(a)
    return found


def _widened(
    rule: Rule, pairs: list[tuple[Tensor | None, Tensor | None]], different: list[Tensor], shape: tuple[int, ...]
) -> Iterator[Tensor]:
    """Pads their B [out, r] with zero columns for the A of others, for ``rule.join``; all zeros for a matrix without factors."""
    for (a, b), wide in zip(pairs, rule.split(torch.zeros(shape))):
        if a is not None and b is not None:
            first = next(i for i, known in enumerate(different) if torch.equal(a, known)) * a.shape[0]
            wide[:, first : first + a.shape[0]] = b
        yield wide


def target_of(name: str) -> str:
    """Returns the member of ``tune.targets`` to which a factor of ours belongs."""
    return name.split(".")[-2]


def _suffix(name: str) -> str:
    """Returns the last two parts of the name of a factor's layer, which identify its kind in every block."""
    return ".".join(name.partition(".lora_")[0].split(".")[-2:])


def _factors(reader: Reader, model: ResolvedModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yields their names and factors."""
    for rule in _as_kept(model):
        layer, _, key = rule.ours.rpartition(".")
        if key == "weight" and f"{layer}.lora_a" in reader.stored:
            a, b = (_whole(reader, f"{layer}.lora_{factor}") for factor in "ab")
            for name, part in zip(rule.theirs, rule.split(b)):
                place = f"base_model.model.{name.removesuffix('.weight')}"
                yield f"{place}.lora_A.weight", a.clone()
                yield f"{place}.lora_B.weight", part.contiguous()


def _whole(reader: Reader, name: str) -> Tensor:
    shape = reader.shapes[name]
    values = torch.empty(whole(name, shape).numel)
    reader.read(whole(name, shape), {"weight": values})
    return values.view(shape)
