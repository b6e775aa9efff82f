"""``trireme size``: a model size from GPUs, days and tokens, its baseline hyper-parameters, and a configuration that is ready to run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli import recipes
from launcher.cli.console import wide_console
from trainer.config import ConfigError, ModelConfig, to_dict
from trainer.config.schema import RECOMPUTE

if TYPE_CHECKING:
    from launcher.config import Config
    from launcher.search.baseline import Baseline
    from launcher.search.size import Budget, Choice, Seconds

HELP = "choose a model size and its hyper-parameters from GPUs, days and tokens"
FAMILIES = ("gpt", "llama", "bloom", "t5", "mt5")

DESCRIPTION = """\
How large a model can be trained in the given days on the given tokens, with the shape, learning rate, batch and schedule that published
runs of that size used, and what the same GPU time could buy instead.

The speed is the cost model's, of the best layout on the hardware that is named (hardware=a100_80), or what --tflops says that a GPU
achieves: executed FLOPs, recomputed ones included, so give --recompute with it (full is the 8 N of older tables, none is 6 N).

examples:
  trireme size --gpus 1024 --days 24 --tokens 300e9 hardware=a100_80
  trireme size --gpus 64 --days 10 --compute-optimal --family llama hardware=h100 --out recipes/mine.yaml
  trireme size --gpus 1024 --days 34 --tokens 300e9 --tflops 140 --recompute full
  trireme size --parameters 20e9 --tokens 300e9
"""


def main(argv: list[str]) -> int:
    """Prints tables and the configuration; 0, or 2 for wrong input."""
    arguments = parser().parse_args(argv)
    check(arguments)
    if arguments.family in ("t5", "mt5"):
        return encoder_decoder(arguments)
    from launcher.search.baseline import baseline

    budget, seconds, config = basis(arguments)
    choice, others = choose(arguments, budget, seconds)
    start = baseline(choice.model, choice.tokens, arguments.gpus or 1)
    ready = configuration(choice, start, config, arguments)
    if arguments.out:
        comment = f"{choice.parameters:.4g} parameters, {choice.tokens:.4g} tokens. Written by 'trireme size'."
        recipes.write(Path(arguments.out), ready, comment)
        print(f"written: {arguments.out}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(document(choice, others, start, ready), indent=2, allow_nan=False))
    else:
        show(choice, others, start, ready, arguments)
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("trireme size", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="hardware=NAME and other keys, in Hydra's grammar")
    made.add_argument("--gpus", type=int, help="number of GPUs")
    made.add_argument("--days", type=float, help="days of training")
    made.add_argument("--tokens", type=float, help="tokens to train on, such as 300e9")
    made.add_argument("--compute-optimal", action="store_true", help="choose the tokens too: 20 per parameter (Chinchilla)")
    made.add_argument("--parameters", type=float, help="a model of this size, such as 20e9, instead of the largest that the days allow")
    made.add_argument("--family", default="gpt", choices=FAMILIES, help="architecture (default: %(default)s)")
    made.add_argument("--vocab", type=int, help="vocabulary (default: the family's)")
    made.add_argument("--seq", type=int, default=2048, help="sequence length (default: %(default)s)")
    made.add_argument("--tflops", type=float, help="TFLOP/s that a GPU executes, instead of the cost model's prediction")
    made.add_argument("--recompute", default="none", choices=RECOMPUTE, help="recomputation that --tflops counts (default: %(default)s)")
    made.add_argument("--json", action="store_true", help="one JSON document on standard output")
    made.add_argument("--out", metavar="FILE", help="write the configuration as a recipe")
    return made


def check(arguments: argparse.Namespace) -> None:
    """Refuse what is missing or contradicts itself."""
    if arguments.tokens is None and not arguments.compute_optimal:
        raise ConfigError("--tokens is missing; say how many tokens there are, or --compute-optimal to choose them by the size")
    if arguments.tokens is not None and arguments.compute_optimal:
        raise ConfigError("--tokens and --compute-optimal contradict each other; give one of them")
    if arguments.parameters is None and (arguments.gpus is None or arguments.days is None):
        raise ConfigError("--gpus and --days say how large a model may be; give both, or the size itself with --parameters")
    if arguments.parameters is not None and arguments.days is not None:
        raise ConfigError("--parameters and --days contradict each other: the size follows from the days; give one of them")
    for name in ("gpus", "days", "tokens", "parameters", "vocab", "seq", "tflops"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name}={value:g} must be more than 0")


def basis(arguments: argparse.Namespace) -> tuple[Budget | None, Seconds | None, Config | None]:
    """The budget, how long a model trains, and the cluster whose layouts are planned (None with --tflops or without GPUs)."""
    from launcher.search.size import Budget, seconds_at

    budget = Budget(arguments.gpus, arguments.days) if arguments.gpus and arguments.days else None
    if arguments.tflops is not None:
        if arguments.overrides:
            raise ConfigError(f"--tflops replaces the cost model, which {arguments.overrides[0]!r} is for; give one of them")
        return budget, seconds_at(arguments.gpus or 1, arguments.tflops, arguments.recompute), None
    if arguments.gpus is None:
        return None, None, None
    config = cluster_of(arguments)
    return budget, planned_seconds(config), config


def cluster_of(arguments: argparse.Namespace) -> Config:
    """The configuration whose cluster has exactly the GPUs asked for."""
    from launcher.config import compose

    config = compose(["run.precision=bf16", *arguments.overrides])
    if not config.cluster.hardware.peak_tflops:
        raise ConfigError("which GPUs? name them with hardware=NAME (conf/hardware), or say what one achieves with --tflops")
    per_node = min(config.cluster.gpus_per_node if any("gpus_per_node" in o for o in arguments.overrides) else 8, arguments.gpus)
    if arguments.gpus % per_node:
        raise ConfigError(f"--gpus={arguments.gpus} does not fill nodes of {per_node}; use a multiple, or set cluster.gpus_per_node")
    cluster = dataclasses.replace(config.cluster, nodes=arguments.gpus // per_node, gpus_per_node=per_node)
    return dataclasses.replace(config, cluster=cluster)


def planned_seconds(config: Config) -> Seconds:
    """Training time by the cost model: steps of the best layout that fits."""
    from launcher.search.baseline import baseline

    def seconds(model: ModelConfig, tokens: float) -> float:
        start = baseline(model, max(tokens, 1e9), config.cluster.world_size)
        run = dataclasses.replace(start.run, precision=config.run.precision)
        _, step = best_layout(dataclasses.replace(config, model=model, run=run))
        return step * tokens / (start.run.global_batch * model.seq)

    return seconds


def best_layout(config: Config) -> tuple[Any, float]:
    """The fastest layout that fits, and its step time; ``ConfigError`` when none does."""
    from launcher.search.plan import plan

    planned = plan(config, dataclasses.replace(config.search.space, partial_recompute=False))
    if not len(planned.order):
        raise ConfigError(f"no layout fits a model of this size into {config.cluster.world_size} devices; ask for fewer days or more GPUs")
    row = int(planned.order[0])
    return planned.layout(row), float(planned.seconds[row])


def choose(arguments: argparse.Namespace, budget: Budget | None, seconds: Seconds | None) -> tuple[Choice, list[Choice]]:
    """The model asked for, and the alternatives of the same budget."""
    from launcher.search.shapes import count, shape_for
    from launcher.search.size import DAY, TOKENS_PER_PARAMETER, Choice, alternatives, largest

    if arguments.parameters is not None:
        model = shape_for(arguments.family, arguments.parameters, arguments.vocab, arguments.seq)
        tokens = arguments.tokens or TOKENS_PER_PARAMETER * count(model)
        days = seconds(model, tokens) / DAY if seconds else float("nan")
        return Choice("asked", model, tokens, days), []
    assert budget is not None and seconds is not None, "checked: GPUs and days are given"
    choice = largest(arguments.family, budget, arguments.tokens, seconds, arguments.vocab, arguments.seq)
    if abs(choice.days / budget.days - 1) > 0.5:
        raise ConfigError(
            f"no {arguments.family} fills {budget.days:g} days on {budget.gpus} GPUs: the nearest has {choice.parameters:.3g} parameters "
            f"and takes {choice.days:.3g} days; change --gpus, --days or --tokens"
        )
    return choice, alternatives(choice, budget, seconds)


def configuration(choice: Choice, start: Baseline, config: Config | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """What differs from the defaults, as a recipe: model, optimizer, run, and the layout and cluster where they are planned."""
    from launcher.search.recipe import recipe

    if config is None:
        return recipe(start.model, start.optimizer, start.run)
    run = dataclasses.replace(start.run, precision=config.run.precision)
    layout, _ = best_layout(dataclasses.replace(config, model=start.model, run=run))
    hardware = next((o.split("=", 1)[1] for o in arguments.overrides if o.startswith("hardware=")), None)
    return recipe(start.model, start.optimizer, run, layout, config.cluster, hardware)


def show(choice: Choice, others: list[Choice], start: Baseline, ready: dict[str, Any], arguments: argparse.Namespace) -> None:
    """The tables for people, and the configuration unless it went into a file."""
    from rich import box
    from rich.table import Table

    console = wide_console()
    made = Table("", "parameters", "tokens", "days", "loss", "layers", "hidden", "heads", "ffn", box=box.SIMPLE_HEAD, pad_edge=False)
    for each in (choice, *others):
        m = each.model
        shape = (str(value) for value in (m.layers, m.hidden, m.heads, m.ffn))
        days = "-" if each.days != each.days else f"{each.days:.1f}"
        made.add_row(each.name, f"{each.parameters / 1e9:.4g} B", f"{each.tokens / 1e9:.4g} B", days, f"{each.loss:.3f}", *shape)
    console.print(made)
    console.print("loss by Chinchilla's fit, good for comparing rows only; compute-optimal: 20 tokens per parameter", style="dim")
    if not arguments.out:
        print(recipes.as_yaml(ready))


def document(choice: Choice, others: list[Choice], start: Baseline, ready: dict[str, Any]) -> dict[str, Any]:
    """What ``--json`` prints."""

    def entry(c: Choice) -> dict[str, Any]:
        days = None if c.days != c.days else c.days
        return {"name": c.name, "parameters": c.parameters, "tokens": c.tokens, "days": days, "loss": c.loss, "model": to_dict(c.model)}

    return {
        "choice": entry(choice),
        "alternatives": [entry(c) for c in others],
        "optimizer": to_dict(start.optimizer),
        "run": to_dict(start.run),
        "config": ready,
    }


def encoder_decoder(arguments: argparse.Namespace) -> int:
    """T5 and mT5: the tool's tables; there is no trainer for them here, so no configuration either."""
    from launcher.search.encoder_decoder import shape_for, size_for

    if arguments.out or arguments.overrides:
        raise ConfigError(f"{arguments.family} is sized here but not trained: no configuration is written; leave out --out and KEY=VALUE")
    parameters = arguments.parameters
    if parameters is None:
        if arguments.tflops is None or arguments.tokens is None:
            raise ConfigError(f"--family {arguments.family} needs --tokens and --tflops (the cost model does not know encoder-decoders)")
        parameters = size_for(arguments.family, arguments.gpus, arguments.days, arguments.tokens, arguments.tflops)
    model = shape_for(arguments.family, parameters)
    found = dataclasses.asdict(model) | {"parameters": model.parameters}
    print(json.dumps(found, indent=2) if arguments.json else "\n".join(f"{key}: {value}" for key, value in found.items()))
    return 0
