"""A model on a number of GPUs: its fastest layout, how long it trains, what that costs, and the configuration of that run. For both ways of
``trireme size``."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.on_cluster import FOLDER, alone
from launcher.cli.overrides import key_of
from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.errors import ConfigError, listed
from trainer.shared.run.read import from_dict, to_dict
from trainer.shared.run.schema import LayoutConfig, ModelConfig

if TYPE_CHECKING:
    from launcher.config import Config
    from launcher.planning.baseline import Baseline
    from launcher.planning.size import ModelSizeOption, Seconds

WRITTEN = "Written by 'trireme size'."
"""A comment of every recipe that it writes: the next one may take its place."""
SIZED = tuple(name for name, family in FAMILIES.items() if family.published is not None)
"""Families of which the shapes of published models are known."""


def model_words(arguments: argparse.Namespace) -> list[str]:
    """Returns the overrides that describe the model; none where they name no model, but only change the default one."""
    words = [word for word in arguments.overrides if f"{key_of(word)}.".startswith("model.")]
    return words if {"model", "model.from"} & {*map(key_of, words)} else []


def asked_model(arguments: argparse.Namespace) -> bool:
    """Returns whether the model is given, not chosen."""
    return arguments.parameters is not None or bool(model_words(arguments))


def cluster_of(arguments: argparse.Namespace) -> Config:
    """The configuration whose cluster has exactly the GPUs asked for, or one node."""
    from launcher.config import compose

    config = compose(["run.precision=bf16", *arguments.overrides], arguments.config_dir)
    if not config.cluster.hardware.peak_tflops:
        raise ConfigError("which GPUs? name them with hardware=NAME (conf/hardware), or say what one achieves with --tflops")
    given = {"cluster", "cluster.gpus_per_node"} & set(map(key_of, arguments.overrides))
    whole = config.cluster.gpus_per_node if given else 8
    gpus = whole if arguments.gpus is None else arguments.gpus
    per_node = min(whole, gpus)
    if gpus % per_node:
        raise ConfigError(f"--gpus={arguments.gpus} does not fill nodes of {per_node}; use a multiple, or set cluster.gpus_per_node")
    cluster = dataclasses.replace(config.cluster, nodes=gpus // per_node, gpus_per_node=per_node)
    try:
        from_dict(type(cluster), to_dict(cluster), "cluster.")
    except ConfigError as error:
        raise ConfigError(f"--gpus={arguments.gpus}: {error}") from None
    return dataclasses.replace(config, cluster=cluster)


def planned_seconds(config: Config) -> Seconds:
    """Training time by the cost model: steps of the best layout that fits."""
    from launcher.planning.baseline import baseline

    known: dict[str, float] = {}

    def seconds(model: ModelConfig, tokens: float) -> float:
        start = baseline(model, max(tokens, 1e9), config.cluster.world_size)
        asked = repr((start.model, start.run.global_batch))  # searches for a size meet the same ones
        if asked not in known:
            known[asked] = best_layout(started(config, start))[1]
        return known[asked] * tokens / (start.run.global_batch * model.seq)

    return seconds


def started(config: Config, start: Baseline) -> Config:
    """Returns the configuration with model, optimizer and run of a baseline, in its own precision."""
    run = dataclasses.replace(start.run, precision=config.run.precision)
    return dataclasses.replace(config, model=start.model, optimizer=start.optimizer, run=run)


def best_layout(config: Config) -> tuple[LayoutConfig, float]:
    """The fastest layout that fits, and its step time; the time is infinite when none fits."""
    from launcher.planning.plan import plan

    planned = plan(config, dataclasses.replace(config.search.space, partial_recompute=False))
    if not len(planned.order):
        return config.layout, math.inf
    row = int(planned.order[0])
    return planned.layout(row), float(planned.seconds[row])


def price_of(arguments: argparse.Namespace) -> float | None:
    """Returns the price of a GPU-hour."""
    from launcher.config import compose

    return compose(arguments.overrides, arguments.config_dir).cluster.price_per_gpu_hour if arguments.overrides else None


def model_of(arguments: argparse.Namespace) -> ModelConfig:
    """Returns the model that was asked for. Raises ``ConfigError`` for options that it has already answered."""
    from launcher.config import compose
    from launcher.planning.shapes import shape_for
    from trainer.shared.run.derived import resolve_model

    if not (words := model_words(arguments)):
        return transferred(shape_for(arguments.family, arguments.parameters, arguments.vocab, arguments.seq), arguments)
    for name in ("vocab", "seq"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name} is for a model that is chosen; with {words[0]} say model.{name}={getattr(arguments, name)}")
    asked = compose(words, arguments.config_dir).model
    if arguments.transfer and asked.transfer.kind != "none":
        raise ConfigError(f"--transfer={arguments.transfer} chooses a base, and model.transfer names one; give one of them")
    model = resolve_model(transferred(asked, arguments))
    if FAMILIES[model.family].published is None:
        raise ConfigError(
            f"{words[0]}: hyper-parameters of published runs are known for {listed(SIZED)}, not for model.family={model.family}; "
            "use --parameters with one of these, or 'trireme plan', which says how long a run of its own settings takes"
        )
    return model


def transferred(model: ModelConfig, arguments: argparse.Namespace) -> ModelConfig:
    """Returns ``model`` with a base for --transfer."""
    from launcher.planning.transfer import with_base

    return with_base(model, arguments.transfer) if arguments.transfer else model


def told_of_base(start: Baseline) -> str:
    """Returns a sentence on the base of a transfer; empty without one."""
    from launcher.planning.shapes import count
    from launcher.planning.transfer import base_of, words_of

    transfer, base = start.model.transfer, base_of(start.model)
    if transfer.kind == "none":
        return ""
    words = " ".join(words_of(base, start.model))
    lr = f"optimizer.lr={start.optimizer.lr:g} is of published runs of its size"
    size = f"width {base.hidden}, {base.layers} layers, {count(base):.3g} parameters"
    return f"base of {transfer.kind}: {size}; {lr}: tune it there, with the keys of this run and {words or 'no others'}"


def document_of_base(start: Baseline) -> dict[str, Any] | None:
    """Returns the base of a transfer, the overrides that make it, and its learning rate; None without one."""
    from launcher.planning.shapes import count
    from launcher.planning.transfer import base_of, words_of

    if start.model.transfer.kind == "none":
        return None
    base = base_of(start.model)
    return {"parameters": count(base), "lr": start.optimizer.lr, "overrides": words_of(base, start.model)}


def named(arguments: argparse.Namespace) -> str:
    """The option or override that names the model."""
    return f"--parameters={arguments.parameters:g}" if arguments.parameters is not None else model_words(arguments)[0]


def configuration(choice: ModelSizeOption, start: Baseline, config: Config | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns a recipe's changes of the defaults: model, optimizer, run, and the planned layout and cluster."""
    from launcher.config import compose
    from launcher.config.hardware import hardware_files
    from launcher.planning.recipe import recipe

    if config is None:
        ready = dataclasses.replace(compose([]), model=start.model, optimizer=start.optimizer, run=start.run)
    else:
        ready = started(config, start)
        ready = dataclasses.replace(ready, layout=best_layout(ready)[0])
    for section in ("model", "optimizer", "run", "layout"):  # a recipe must be a valid run
        part = getattr(ready, section)
        from_dict(type(part), to_dict(part), f"these options lead to a run that cannot be: {section}.")
    return recipe(ready, compose(alone(ready)), hardware_files())


def how_to_use(path: Path) -> str:
    """The command that trains the recipe at ``path``, or where it has to be for that."""
    from launcher.config import conf_dir

    places = (folder / f"{path.stem}.yaml" for folder in (conf_dir() / "recipe", FOLDER))
    if path.resolve() == next((place.resolve() for place in places if place.is_file()), None):
        return f"use it: trireme train recipe={path.stem}"
    return f"'trireme train recipe=NAME' would find it as {FOLDER}/NAME.yaml, with a NAME that no recipe has that ships"
