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
from launcher.cli.deadline import backwards
from launcher.cli.overrides import NamedOption, add_overrides, key_of
from launcher.cli.parser import VerbParser
from launcher.cli.sized_run import (
    SIZED,
    WRITTEN,
    asked_model,
    cluster_of,
    configuration,
    document_of_base,
    how_to_use,
    model_of,
    model_words,
    named,
    planned_seconds,
    price_of,
    told_of_base,
    transferred,
)
from launcher.labels import amount, money, plural
from launcher.named_files import check_own
from trainer.shared.run.errors import ConfigError, listed
from trainer.shared.run.read import from_dict, to_dict
from trainer.shared.run.schema import RECOMPUTE, TRANSFERS, ModelConfig

if TYPE_CHECKING:
    from launcher.config import Config
    from launcher.planning.baseline import Baseline
    from launcher.planning.size import Budget, ModelSizeOption, Seconds


HONOURED = ("cluster.", "hardware.", "trainer.", "data.", "tracking.", "run.precision.", "search.space.")
"""Keys that may be given. Other keys are outputs of this command."""

PRICE = "cluster.price_per_gpu_hour"

DESCRIPTION = """\
Without a model: the largest one that trains on the tokens within the days, with the hyper-parameters of published runs of that size, and
what the same GPU time could buy instead. With a model (model=NAME, or --parameters) and --days: the GPUs that end in time, the fewest, the
cheapest and the fastest number, with layout, GPU-hours and money (cluster.price_per_gpu_hour); --gpus is then the most that there are.

The speed is the cost model's, of the best layout on the named hardware, or what --tflops says that a GPU executes, with --recompute.

examples:
  trireme size --gpus 1024 --days 24 --tokens 300e9 hardware=a100_80
  trireme size --gpus 64 --days 10 --compute-optimal hardware=h100
  trireme size --gpus 1024 --days 34 --tokens 300e9 --tflops 140 --recompute full
  trireme size --parameters 20e9 --tokens 300e9 --days 30 hardware=h100
"""


def main(argv: list[str]) -> int:
    """Prints tables and the configuration; 0, or 2 for wrong input."""
    arguments = parser().parse_intermixed_args(argv)
    from launcher.planning.baseline import baseline

    positive(arguments)
    check(arguments)
    if arguments.out is not None:
        check_own(arguments.out, "--out", lambda text: WRITTEN in text)
    if arguments.days is not None and asked_model(arguments):
        return backwards(arguments)
    budget, seconds, config = basis(arguments)
    choice, others = choose(arguments, budget, seconds)
    start = baseline(choice.model, choice.tokens, arguments.gpus or 1)
    ready = configuration(choice, start, config, arguments)
    if arguments.out is not None:
        comment = f"{choice.parameters:.4g} parameters, {choice.tokens:.4g} tokens. {WRITTEN}"
        recipes.write(Path(arguments.out), ready, comment, "--out")
        print(f"written: {arguments.out}; {how_to_use(Path(arguments.out))}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(document(choice, others, start, ready, arguments), indent=2, allow_nan=False))
    else:
        show(choice, others, start, ready, arguments)
    return 0


def parser() -> VerbParser:
    made = VerbParser("trireme size", DESCRIPTION)
    add_overrides(made, "hardware=NAME and other keys, in Hydra's grammar")
    made.add_argument("--gpus", type=int, help="number of GPUs; with a model and --days, the most there are")
    made.add_argument("--days", type=float, help="days of training")
    made.add_argument("--tokens", type=float, help="tokens to train on, such as 300e9")
    made.add_argument("--compute-optimal", action="store_true", help="choose the tokens too: 20 per parameter (Chinchilla)")
    made.add_argument("--parameters", type=float, metavar="N", help="a model of this size, such as 20e9, instead of the largest")
    made.add_argument("--family", default=ModelConfig.family, choices=SIZED, help="architecture (default: %(default)s)")
    made.add_argument("--vocab", type=int, help="vocabulary (default: the family's)")
    made.add_argument("--seq", type=int, help="sequence length (default: the family's, 2048 or 512)")
    made.add_argument("--tflops", type=float, help="TFLOP/s that a GPU executes, instead of the cost model's prediction")
    made.add_argument("--recompute", choices=RECOMPUTE, help="recomputation that --tflops counts (default: none)")
    made.add_argument("--transfer", choices=TRANSFERS[1:], help="name a small base, and its hyper-parameters")
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
    if arguments.parameters is not None and (words := model_words(arguments)):
        raise ConfigError(f"--parameters={arguments.parameters:g} and {words[0]} contradict each other; give one of them")
    if not asked_model(arguments) and (arguments.gpus is None or arguments.days is None):
        raise ConfigError("--gpus and --days say how large a model may be; give both, or the model itself (--parameters, or model=NAME)")
    backwards = asked_model(arguments) and arguments.days is not None
    if strange := [
        word for word in arguments.overrides if not f"{key_of(word)}.".startswith(HONOURED) and word not in model_words(arguments)
    ]:
        known = listed(key.strip(".") for key in HONOURED)
        raise ConfigError(f"{strange[0]} is not for 'trireme size', which chooses model, hyper-parameters and layout; keys are {known}")
    if arguments.recompute is not None and arguments.tflops is None:
        raise ConfigError(f"--recompute={arguments.recompute} says what --tflops counts; give both, or neither for the best layout's own")
    places = [word for word in arguments.overrides if word not in model_words(arguments)]
    if arguments.gpus is None and not backwards and (arguments.tflops is not None or places):
        given = places[0] if places else f"--tflops={arguments.tflops:g}"
        raise ConfigError(f"{given} says where a model trains; say with --gpus on how many, or with --days in what time")
    if arguments.tflops is not None and (others := [word for word in places if key_of(word) != PRICE]):
        raise ConfigError(f"--tflops replaces the cost model, which {others[0]!r} is for; give one of them")
    if nodes := [word for word in arguments.overrides if key_of(word) == "cluster.nodes"]:
        raise ConfigError(
            f"{nodes[0]} contradicts --gpus={arguments.gpus}, which nodes follow from; set cluster.gpus_per_node, if anything"
            if arguments.gpus is not None
            else f"{nodes[0]} is an answer of this command; give the most there are with --gpus, and cluster.gpus_per_node, if anything"
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


def choose(arguments: argparse.Namespace, budget: Budget | None, seconds: Seconds | None) -> tuple[ModelSizeOption, list[ModelSizeOption]]:
    """The model asked for, and the alternatives of the same budget."""
    from launcher.planning.shapes import count
    from launcher.planning.size import DAY, TOKENS_PER_PARAMETER, ModelSizeOption, alternatives, largest

    if asked_model(arguments):
        model = model_of(arguments)
        tokens = arguments.tokens or TOKENS_PER_PARAMETER * count(model)
        days = seconds(model, tokens) / DAY if seconds else math.nan
        if math.isinf(days):
            raise ConfigError(
                f"{named(arguments)} does not fit into the memory of {plural(arguments.gpus, 'GPU')} in any layout; "
                "give more --gpus, or fewer --parameters"
            )
        return ModelSizeOption("asked", model, tokens, days), []
    assert budget is not None and seconds is not None, "checked: GPUs and days are given"
    choice = largest(arguments.family, budget, arguments.tokens, seconds, arguments.vocab, arguments.seq)
    others = alternatives(choice, budget, seconds)
    return dataclasses.replace(choice, model=transferred(choice.model, arguments)), others


def cost_of(choice: ModelSizeOption, arguments: argparse.Namespace) -> dict[str, float | None]:
    """Returns the GPU-hours of a choice and their price; None where GPUs or price are not known."""
    hours = None if arguments.gpus is None or math.isnan(choice.days) else arguments.gpus * choice.days * 24
    price = price_of(arguments)
    return {"gpu_hours": hours, "price": None if hours is None or price is None else hours * price}


LESS = {"GPU-hours": 1, "encoder": 1, "layers": 2, "hidden": 2, "heads": 2, "ffn": 2}
"""Columns that a narrow terminal does without; the configuration has them."""


def show(
    choice: ModelSizeOption, others: list[ModelSizeOption], start: Baseline, ready: dict[str, Any], arguments: argparse.Namespace
) -> None:
    """The tables for people, and the configuration unless it went into a file."""
    from launcher.planning.size import MEMORY

    console, all_of_them = wide_console(), (choice, *others)
    costs = [cost_of(each, arguments) for each in all_of_them]
    figures = {
        "parameters": [f"{each.parameters / 1e9:.4g} B" for each in all_of_them],
        "tokens": [f"{each.tokens / 1e9:.4g} B" for each in all_of_them],
        "days": ["-" if each.days != each.days else f"{each.days:.1f}" for each in all_of_them],
        "GPU-hours": [amount(cost["gpu_hours"]) for cost in costs],
        "cost": [money(cost["price"]) for cost in costs],
        "loss": [f"{each.loss:.3f}" for each in all_of_them],
        **{name: [str(getattr(each.model, name)) for each in all_of_them] for name in ("layers", "hidden", "heads", "ffn")},
        "encoder": [str(each.model.encoder_layers or "-") for each in all_of_them],  # those of its layers
    }
    names = Column("", [each.name for each in all_of_them], least=len("compute-optimal"))
    known = {head: cells for head, cells in figures.items() if {*cells} != {"-"}}
    columns = [names, *(Column(head, cells, right=True, keep=LESS.get(head, 0)) for head, cells in known.items())]
    console.print(fitted_table(columns, console.width, [""] * len(all_of_them)))
    if choice.limit == MEMORY:
        console.print(f"memory, not days, limits the size: a larger {choice.model.family} fits in no layout; more --gpus would hold it")
    if base := told_of_base(start):
        console.print(base)
    console.print("loss by Chinchilla's fit, good for comparing rows only; compute-optimal: 20 tokens per parameter", style="dim")
    if arguments.out is None:
        print(recipes.as_yaml(ready))


def document(
    choice: ModelSizeOption, others: list[ModelSizeOption], start: Baseline, ready: dict[str, Any], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Returns the document of ``--json``."""

    def entry(c: ModelSizeOption) -> dict[str, Any]:
        days = None if c.days != c.days else c.days
        known = {"name": c.name, "parameters": c.parameters, "tokens": c.tokens, "days": days, "limit": c.limit, "loss": c.loss}
        return {**known, **cost_of(c, arguments), "model": to_dict(c.model)}

    return {
        "choice": entry(choice),
        "alternatives": [entry(c) for c in others],
        "optimizer": to_dict(start.optimizer),
        "run": to_dict(start.run),
        "base": document_of_base(start),
        "config": ready,
    }
