"""``trireme plan``: all candidates on a cluster, predicted and sorted, with the reason for each that is excluded."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from typing import TYPE_CHECKING

from launcher.cli.console import emit
from launcher.cli.overrides import PathOption, add_overrides, goal_asked
from launcher.cli.parser import VerbParser
from launcher.goals.views import Answer
from launcher.named_files import check_own
from trainer.shared.run.errors import ConfigError

if TYPE_CHECKING:
    from launcher.config import Config
    from launcher.goals.goal import GoalPlan


DESCRIPTION = """\
Predicts step time and memory of every layout that obeys the rules: tensor x pipeline x virtual pipeline x micro-batch x schedule x
recomputation x sequence parallelism x state sharding. Nothing is run. Layouts that no other one with the same ranks beats in both
time and memory are listed, fastest first. Next to a step time stand the interval in which 80 % of such predictions lie
and the probability that this layout is the fastest. Those that fit into memory with a probability below 50 % are listed apart. Values of
layout keys keep to layouts that have them. The layout of the configuration itself, such as a recipe's published one, is compared
with the first.

With task=inference it plans how to serve a model: workload=chat|code|summarise|reasoning|nemo|nemo_long (or workload.{input,output}, and
one of workload.{batch,concurrency,rate,trace}), engine=NAME, limits sla.{latency_ms,ttft_ms,tpot_ms,throughput,devices,cost}.

examples:
  trireme plan recipe=gpt3_175b
  trireme plan recipe=gpt3_175b layout.tensor=4,8 layout.schedule=1f1b
  trireme plan recipe=gpt3_175b trainer=megatron_core
  trireme plan recipe=gpt3_175b --measure 3
  trireme plan task=inference recipe=gpt3_175b workload=nemo engine=fastertransformer cluster.nodes=8 sla.latency_ms=2200
  trireme plan hardware=h100 cluster.nodes=16 cluster.gpus_per_node=8 model.layers=40 model.hidden=5120 model.heads=40 \\
      model.vocab=51200 model.seq=2048 run.global_batch=1024 run.precision=bf16 --explain 1
"""


def main(argv: list[str]) -> int:
    """Returns 0 if a candidate fits and keeps the limits; 1 if none is likely to."""
    arguments = parser().parse_intermixed_args(argv)
    check_options(arguments)
    goal, config, wanted = goal_asked(arguments.overrides, arguments.config_dir)
    if arguments.measure is not None and goal.unmeasured:
        raise ConfigError(goal.unmeasured)
    started = time.perf_counter()
    planned = goal.plan(limited(config, arguments.limit), wanted)
    answer = answer_of(planned, arguments, time.perf_counter() - started)
    emit(dataclasses.replace(answer, views=[planned.heading(), *answer.views]), arguments.json)
    return 0 if planned.found or arguments.explain is not None else 1


def check_options(arguments: argparse.Namespace) -> None:
    """Raises ``ConfigError`` for options that do not go together, or a file that may not be written."""
    if arguments.top < 1:
        raise ConfigError(f"--top={arguments.top} must be 1 or more")
    if arguments.svg is not None and arguments.explain is None:
        raise ConfigError(f"--svg={arguments.svg} is where the timeline of one layout is drawn; say which, as in --explain 1")
    if arguments.measure is not None and (arguments.measure < 1 or arguments.explain is not None):
        raise ConfigError(f"--measure={arguments.measure} is how many layouts to measure, 1 or more, and stands without --explain")
    if arguments.svg is not None:
        check_own(arguments.svg, "--svg", drew)


def answer_of(planned: GoalPlan, arguments: argparse.Namespace, seconds: float) -> Answer:
    """Returns the answer to the options: one row, the rows to measure, or the list."""
    if arguments.explain is not None:
        return planned.explained(arguments.explain, arguments.svg)
    if arguments.measure is not None:
        return planned.measures(arguments.measure, arguments.overrides)
    folder = ["--config-dir", str(arguments.config_dir)] if arguments.config_dir else []
    return planned.answer(arguments.top, seconds, [*arguments.overrides, *folder])


def parser() -> VerbParser:
    """Returns the parser of Hydra's overrides and this command's options."""
    made = VerbParser("trireme plan", DESCRIPTION)
    add_overrides(made)
    made.add_argument("--top", type=int, default=10, metavar="N", help="how many layouts are listed (default: %(default)s)")
    made.add_argument("--measure", type=int, metavar="N", help="the N layouts to measure so that the step times of all are known best")
    made.add_argument("--json", action="store_true", help="one JSON document on standard output")
    made.add_argument("--explain", metavar="LAYOUT", help="a place of the list or a layout's name: its parts")
    made.add_argument("--svg", action=PathOption, metavar="FILE", help="with --explain: draw the timeline there")
    made.add_argument("--limit", type=float, metavar="GB", help="memory to plan for, per device, in 1e9 bytes (default: the hardware's)")
    return made


def limited(config: Config, limit_gb: float | None) -> Config:
    """Returns ``config`` with another memory budget. Raises ``ConfigError`` for one that is not a positive number."""
    if limit_gb is None:
        return config
    if not 0 < limit_gb < math.inf:
        raise ConfigError(f"--limit={limit_gb:g} must be a number of GB above 0")
    hardware = dataclasses.replace(config.cluster.hardware, memory_gb=limit_gb)
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, hardware=hardware))


def drew(text: str) -> bool:
    """Returns whether a file that begins with ``text`` is a picture of ``draw``."""
    return text.startswith("<svg ") and text.partition(">")[2].startswith("<style>:root")
