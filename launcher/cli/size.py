"""``trireme size``: a model size from GPUs, days and tokens, its baseline hyper-parameters, and a configuration that is ready to run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli import recipes
from launcher.cli.console import Column, fitted_table, wide_console
from launcher.cli.on_cluster import FOLDER, alone
from launcher.cli.overrides import NamedOption, add_overrides, key_of
from launcher.cli.parser import VerbParser
from launcher.labels import plural
from launcher.named_files import check_own
from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.errors import ConfigError, listed
from trainer.shared.run.read import from_dict, to_dict
from trainer.shared.run.schema import RECOMPUTE, LayoutConfig, ModelConfig

if TYPE_CHECKING:
    from launcher.config import Config
    from launcher.planning.baseline import Baseline
    from launcher.planning.size import Budget, ModelSizeOption, Seconds


HONOURED = ("cluster.", "hardware.", "trainer.", "data.", "tracking.", "run.precision.", "search.space.")
"""Keys that may be given. Other keys are outputs of this command."""

WRITTEN = "Written by 'trireme size'."
"""A comment of every recipe that it writes: the next one may take its place."""

DESCRIPTION = """\
How large a model can be trained in the given days on the given tokens, with the shape, learning rate, batch and schedule that published
runs of that size used, and what the same GPU time could buy instead.

The speed is the cost model's, of the best layout on the hardware that is named (hardware=a100_80), or what --tflops says that a GPU
achieves: executed FLOPs, recomputed ones included, so give --recompute with it (full is the 8 N of older tables, none is 6 N).

examples:
  trireme size --gpus 1024 --days 24 --tokens 300e9 hardware=a100_80
  trireme size --gpus 64 --days 10 --compute-optimal --family llama hardware=h100 --out runs/recipe/mine.yaml
  trireme size --gpus 1024 --days 34 --tokens 300e9 --tflops 140 --recompute full
  trireme size --parameters 20e9 --tokens 300e9
"""


def main(argv: list[str]) -> int:
    """Prints tables and the configuration; 0, or 2 for wrong input."""
    arguments = parser().parse_intermixed_args(argv)
    from launcher.planning.baseline import baseline

    positive(arguments)
    check(arguments)
    if arguments.out is not None:
        check_own(arguments.out, "--out", lambda text: WRITTEN in text)
    budget, seconds, config = basis(arguments)
    choice, others = choose(arguments, budget, seconds)
    start = baseline(choice.model, choice.tokens, arguments.gpus or 1)
    ready = configuration(choice, start, config, arguments)
    if arguments.out is not None:
        comment = f"{choice.parameters:.4g} parameters, {choice.tokens:.4g} tokens. {WRITTEN}"
        recipes.write(Path(arguments.out), ready, comment, "--out")
        print(f"written: {arguments.out}; {how_to_use(Path(arguments.out))}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(document(choice, others, start, ready), indent=2, allow_nan=False))
    else:
        show(choice, others, start, ready, arguments)
    return 0


SIZED = tuple(name for name, family in FAMILIES.items() if family.published is not None)
"""Families of which the shapes of published models are known."""


def parser() -> VerbParser:
    made = VerbParser("trireme size", DESCRIPTION)
    add_overrides(made, "hardware=NAME and other keys, in Hydra's grammar")
    made.add_argument("--gpus", type=int, help="number of GPUs")
    made.add_argument("--days", type=float, help="days of training")
    made.add_argument("--tokens", type=float, help="tokens to train on, such as 300e9")
    made.add_argument("--compute-optimal", action="store_true", help="choose the tokens too: 20 per parameter (Chinchilla)")
    made.add_argument("--parameters", type=float, help="a model of this size, such as 20e9, instead of the largest that the days allow")
    made.add_argument("--family", default=ModelConfig.family, choices=SIZED, help="architecture (default: %(default)s)")
    made.add_argument("--vocab", type=int, help="vocabulary (default: the family's)")
    made.add_argument("--seq", type=int, help="sequence length (default: 2048)")
    made.add_argument("--tflops", type=float, help="TFLOP/s that a GPU executes, instead of the cost model's prediction")
    made.add_argument("--recompute", choices=RECOMPUTE, help="recomputation that --tflops counts (default: none)")
    made.add_argument("--json", action="store_true", help="one JSON document on standard output")
    made.add_argument(
        "--out", action=NamedOption, metavar="FILE", help="write the configuration as a recipe; recipe=NAME finds runs/recipe/NAME.yaml"
    )
    return made


def positive(arguments: argparse.Namespace) -> None:
    """Refuses invalid amounts."""
    for name in ("gpus", "days", "tokens", "parameters", "vocab", "seq", "tflops"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name}={value:g} must be more than 0")
    for name in ("vocab", "seq"):
        if (value := getattr(arguments, name)) is not None:
            from_dict(ModelConfig, {name: value}, "--")  # what model.vocab may not be, --vocab may not either


def check(arguments: argparse.Namespace) -> None:
    """Refuses missing, contradicting and unused options."""
    if arguments.tokens is None and not arguments.compute_optimal:
        raise ConfigError("--tokens is missing; say how many tokens there are, or --compute-optimal to choose them by the size")
    if arguments.tokens is not None and arguments.compute_optimal:
        raise ConfigError("--tokens and --compute-optimal contradict each other; give one of them")
    if arguments.parameters is None and (arguments.gpus is None or arguments.days is None):
        raise ConfigError("--gpus and --days say how large a model may be; give both, or the size itself with --parameters")
    if arguments.parameters is not None and arguments.days is not None:
        raise ConfigError("--parameters and --days contradict each other: the size follows from the days; give one of them")
    if strange := [word for word in arguments.overrides if not f"{key_of(word)}.".startswith(HONOURED)]:
        known = listed(key.strip(".") for key in HONOURED)
        raise ConfigError(f"{strange[0]} is not for 'trireme size', which chooses model, hyper-parameters and layout; keys are {known}")
    if arguments.recompute is not None and arguments.tflops is None:
        raise ConfigError(f"--recompute={arguments.recompute} says what --tflops counts; give both, or neither for the best layout's own")
    if arguments.gpus is None and (arguments.tflops is not None or arguments.overrides):
        given = arguments.overrides[0] if arguments.overrides else f"--tflops={arguments.tflops:g}"
        raise ConfigError(f"{given} says where a model trains; say with --gpus on how many")
    if arguments.tflops is not None and arguments.overrides:
        raise ConfigError(f"--tflops replaces the cost model, which {arguments.overrides[0]!r} is for; give one of them")
    if nodes := [word for word in arguments.overrides if key_of(word) == "cluster.nodes"]:
        raise ConfigError(
            f"{nodes[0]} contradicts --gpus={arguments.gpus}, which nodes follow from; set cluster.gpus_per_node, if anything"
        )


def basis(arguments: argparse.Namespace) -> tuple[Budget | None, Seconds | None, Config | None]:
    """The budget, how long a model trains, and the cluster whose layouts are planned (None with --tflops or without GPUs)."""
    from launcher.planning.size import Budget, seconds_at

    if arguments.gpus is None:
        return None, None, None
    budget = Budget(arguments.gpus, arguments.days) if arguments.days else None
    if arguments.tflops is not None:
        return budget, seconds_at(arguments.gpus, arguments.tflops, arguments.recompute or "none"), None
    config = cluster_of(arguments)
    return budget, planned_seconds(config), config


def cluster_of(arguments: argparse.Namespace) -> Config:
    """The configuration whose cluster has exactly the GPUs asked for."""
    from launcher.config import compose

    config = compose(["run.precision=bf16", *arguments.overrides], arguments.config_dir)
    if not config.cluster.hardware.peak_tflops:
        raise ConfigError("which GPUs? name them with hardware=NAME (conf/hardware), or say what one achieves with --tflops")
    given = {"cluster", "cluster.gpus_per_node"} & set(map(key_of, arguments.overrides))
    per_node = min(config.cluster.gpus_per_node if given else 8, arguments.gpus)
    if arguments.gpus % per_node:
        raise ConfigError(f"--gpus={arguments.gpus} does not fill nodes of {per_node}; use a multiple, or set cluster.gpus_per_node")
    cluster = dataclasses.replace(config.cluster, nodes=arguments.gpus // per_node, gpus_per_node=per_node)
    try:
        from_dict(type(cluster), to_dict(cluster), "cluster.")
    except ConfigError as error:
        raise ConfigError(f"--gpus={arguments.gpus}: {error}") from None
    return dataclasses.replace(config, cluster=cluster)


def planned_seconds(config: Config) -> Seconds:
    """Training time by the cost model: steps of the best layout that fits."""
    from launcher.planning.baseline import baseline

    def seconds(model: ModelConfig, tokens: float) -> float:
        start = baseline(model, max(tokens, 1e9), config.cluster.world_size)
        run = dataclasses.replace(start.run, precision=config.run.precision)
        _, step = best_layout(dataclasses.replace(config, model=model, run=run))
        return step * tokens / (start.run.global_batch * model.seq)

    return seconds


def best_layout(config: Config) -> tuple[LayoutConfig, float]:
    """The fastest layout that fits, and its step time; the time is infinite when none fits."""
    from launcher.planning.plan import plan

    planned = plan(config, dataclasses.replace(config.search.space, partial_recompute=False))
    if not len(planned.order):
        return config.layout, math.inf
    row = int(planned.order[0])
    return planned.layout(row), float(planned.seconds[row])


def choose(arguments: argparse.Namespace, budget: Budget | None, seconds: Seconds | None) -> tuple[ModelSizeOption, list[ModelSizeOption]]:
    """The model asked for, and the alternatives of the same budget."""
    from launcher.planning.shapes import count, shape_for
    from launcher.planning.size import DAY, TOKENS_PER_PARAMETER, ModelSizeOption, alternatives, largest

    seq = arguments.seq or 2048
    if arguments.parameters is not None:
        model = shape_for(arguments.family, arguments.parameters, arguments.vocab, seq)
        tokens = arguments.tokens or TOKENS_PER_PARAMETER * count(model)
        days = seconds(model, tokens) / DAY if seconds else math.nan
        if math.isinf(days):
            raise ConfigError(
                f"--parameters={arguments.parameters:g} does not fit into the memory of {plural(arguments.gpus, 'GPU')} in any layout; "
                "give more --gpus, or fewer --parameters"
            )
        return ModelSizeOption("asked", model, tokens, days), []
    assert budget is not None and seconds is not None, "checked: GPUs and days are given"
    choice = largest(arguments.family, budget, arguments.tokens, seconds, arguments.vocab, seq)
    return choice, alternatives(choice, budget, seconds)


def configuration(choice: ModelSizeOption, start: Baseline, config: Config | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns a recipe's changes of the defaults: model, optimizer, run, and the planned layout and cluster."""
    from launcher.config import compose
    from launcher.config.hardware import hardware_files
    from launcher.planning.recipe import recipe

    ready = dataclasses.replace(config or compose([]), model=start.model, optimizer=start.optimizer, run=start.run)
    if config is not None:
        ready = dataclasses.replace(ready, run=dataclasses.replace(start.run, precision=config.run.precision))
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


def show(
    choice: ModelSizeOption, others: list[ModelSizeOption], start: Baseline, ready: dict[str, Any], arguments: argparse.Namespace
) -> None:
    """The tables for people, and the configuration unless it went into a file."""
    from launcher.planning.size import MEMORY

    console, all_of_them = wide_console(), (choice, *others)
    figures = {
        "parameters": [f"{each.parameters / 1e9:.4g} B" for each in all_of_them],
        "tokens": [f"{each.tokens / 1e9:.4g} B" for each in all_of_them],
        "days": ["-" if each.days != each.days else f"{each.days:.1f}" for each in all_of_them],
        "loss": [f"{each.loss:.3f}" for each in all_of_them],
        **{name: [str(getattr(each.model, name)) for each in all_of_them] for name in ("layers", "hidden", "heads", "ffn")},
    }
    names = Column("", [each.name for each in all_of_them], least=len("compute-optimal"))
    columns = [names, *(Column(head, cells, right=True) for head, cells in figures.items())]
    console.print(fitted_table(columns, console.width, [""] * len(all_of_them)))
    if choice.limit == MEMORY:
        console.print(f"memory, not days, limits the size: a larger {choice.model.family} fits in no layout; more --gpus would hold it")
    console.print("loss by Chinchilla's fit, good for comparing rows only; compute-optimal: 20 tokens per parameter", style="dim")
    if arguments.out is None:
        print(recipes.as_yaml(ready))


def document(choice: ModelSizeOption, others: list[ModelSizeOption], start: Baseline, ready: dict[str, Any]) -> dict[str, Any]:
    """Returns the document of ``--json``."""

    def entry(c: ModelSizeOption) -> dict[str, Any]:
        days = None if c.days != c.days else c.days
        known = {"name": c.name, "parameters": c.parameters, "tokens": c.tokens, "days": days, "limit": c.limit, "loss": c.loss}
        return {**known, "model": to_dict(c.model)}

    return {
        "choice": entry(choice),
        "alternatives": [entry(c) for c in others],
        "optimizer": to_dict(start.optimizer),
        "run": to_dict(start.run),
        "config": ready,
    }
