"""``trireme evaluate CHECKPOINT``: loss, perplexity and bits per byte of a checkpoint on held-out text, under any layout and on any
cluster."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.overrides import PathOption, add_overrides
from launcher.cli.parser import VerbParser
from trainer.shared.corpora.index import TOKENIZER, other_words, read_in_training, read_index
from trainer.shared.records.artifacts import check_model_of, checkpoint_facts
from trainer.shared.records.stage_run import StageRun
from trainer.shared.run.command_lines import ScoreCommand
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict
from trainer.shared.run.schema import ModelConfig
from trainer.shared.run.stages import BUILTIN_TASKS

if TYPE_CHECKING:
    from launcher.config import Config

DESCRIPTION = """\
Reads the last data.held_out of the corpus data.path (all of it where nothing is held out), up to run.steps batches of run.global_batch
sequences. The model is the checkpoint's, model.seq at most; the layout, the cluster and the precision may be any.

examples:
  trireme evaluate runs/trials/ID/checkpoints data.path=data/stdlib data.held_out=0.05
  trireme evaluate HUGGINGFACE_FOLDER --tasks addition,prose layout.tensor=2
  trireme evaluate runs/trials/ID layout.tensor=2 layout.pipeline=2 data.path=data/other
"""


ROW = "model.seq="
"""The key of the model that an evaluation may have: the length of its rows."""
OF_TASKS = ("tasks_folder", "tokenizer", "limit", "task")
"""Arguments that an evaluation on a corpus does not take."""


def main(argv: list[str]) -> int:
    """0 when it was evaluated, 1 when the job failed, 2 for wrong input."""
    arguments = parser().parse_intermixed_args(argv)
    if arguments.tasks is not None:
        return evaluate_tasks(arguments)
    for name in OF_TASKS:
        if (given := getattr(arguments, name)) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} {given} is for tasks; name some with --tasks, or leave it out")
    from launcher.config import check_launchable, check_ours, compose, locate_data, resolve
    from launcher.sweep.oneoff import run_job

    config = compose(arguments.overrides, arguments.config_dir)
    check_launchable(config)
    check_ours(config, "evaluate")
    wanted = for_evaluation(config, arguments.checkpoint, arguments.overrides)
    told = StageRun(verb="evaluate", sources={"model": str(wanted.run.checkpoint.dir)})
    located = locate_data(resolve(wanted))
    if note := doubt(located):
        print(note, file=sys.stderr)
    figures = run_job(located, "evaluate", lambda *_: None, stage=told)["evaluation"]
    print(json.dumps(figures) if arguments.json else sentence(figures))
    return 0


def parser() -> VerbParser:
    made = VerbParser("trireme evaluate", DESCRIPTION)
    made.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a folder of them (the newest is taken)")
    add_overrides(made)
    made.add_argument("--json", action="store_true", help="one JSON document instead of a sentence")
    tasks = made.add_argument_group("tasks, in place of the corpus")
    tasks.add_argument(
        "--tasks", metavar="NAMES", help=f"of lm-evaluation-harness, with commas between; without a download: {', '.join(BUILTIN_TASKS)}"
    )
    tasks.add_argument(
        "--tasks-folder", action=PathOption, metavar="DIR", help="more of them: YAML files, or what 'trireme prepare --tasks' filled"
    )
    tasks.add_argument(
        "--tokenizer", action=PathOption, metavar="FILE", help="tokenizer.json or a prepared corpus (default: next to the weights)"
    )
    tasks.add_argument("--limit", type=int, metavar="N", help="only the first N items of each task")
    tasks.add_argument(
        "--task",
        type=int,
        metavar="N",
        help="multi-task prompt tuning: task whose virtual tokens are prepended (default: 0)",
    )
    return made


def evaluate_tasks(arguments: argparse.Namespace) -> int:
    """Exit code as ``main``."""
    from launcher.cli.generate import for_generation, told
    from launcher.config import locate_data
    from launcher.stages.tasks import check_tasks
    from launcher.sweep.oneoff import run_job

    names = arguments.tasks.split(",")
    check_tasks(names, arguments.tasks_folder)
    config = for_generation(str(arguments.checkpoint), arguments.overrides, arguments.config_dir)
    given = {name: value for name in OF_TASKS if (value := getattr(arguments, name)) is not None}
    command = ScoreCommand(model=str(arguments.checkpoint), tasks=names, **given)
    figures = run_job(locate_data(config), "evaluate", lambda *_: None, stage=told("evaluate", command))["evaluation"]
    print(json.dumps(figures) if arguments.json else scores(figures))
    return 0


def scores(figures: dict[str, Any]) -> str:
    """The figures of tasks for a person: one line each."""
    part = f" (only {figures['limit']} items of each)" if figures["limit"] else ""
    lines = []
    for name, found in figures["tasks"].items():
        values = [f"{metric} {value:.4f}" for metric, value in found.items() if "stderr" not in metric and isinstance(value, float)]
        lines.append(f"{name}: {', '.join(values)} over {figures['items'].get(name, '?')} items{part}")
    return "\n".join(lines)


def for_evaluation(config: Config, checkpoint: Path, overrides: list[str]) -> Config:
    """Returns ``config`` with the model and row length of the newest checkpoint in ``checkpoint``, for an evaluation. Raises
    ``ConfigError`` if there is none, or for other keys of the model."""
    given = [word for word in overrides if word.lstrip("+").startswith(("model.", "model=")) and not word.startswith(ROW)]
    if given:
        raise ConfigError(f"{given[0]}: the model is the checkpoint's; leave it out")
    folder, manifest = checkpoint_facts(checkpoint)
    settings = dataclasses.replace(config.run.checkpoint, dir=os.path.abspath(folder), every=0)
    steps = config.run.steps if any(word.startswith("run.steps=") for word in overrides) else 10**9
    run = dataclasses.replace(config.run, task="evaluate", steps=steps, warmup_steps=0, checkpoint=settings)
    model = from_dict(ModelConfig, manifest["model"], "model.")
    trained = (manifest.get("data") or {}).get("seq", model.seq)
    seq = config.model.seq if any(word.startswith(ROW) for word in overrides) else trained
    model = dataclasses.replace(model, seq=seq)
    check_model_of(folder, manifest["model"], resolve_model(model), "leave it out")
    return dataclasses.replace(config, model=model, run=run)


def doubt(config: Config) -> str:
    """A line for the user where the text is in other words than the model's; empty where it is that of the training, or nothing tells."""
    given, weights = Path(config.data.path, TOKENIZER), Path(str(config.run.checkpoint.dir))
    if config.data.kind == "synthetic" or not given.is_file():
        return ""
    trained = (checkpoint_facts(weights)[1].get("data") or {}).get("corpus", "")
    if config.data.kind == "corpus" and read_in_training(trained, read_index(config.data).sha256, 0):
        return ""
    return other_words(given, weights, config.model.vocab)


def sentence(figures: dict[str, Any]) -> str:
    """The figures for a person."""
    size = figures["bits_per_byte"]
    read = "text that it was trained on" if figures["read_in_training"] else "text that it has not seen"
    known = f"loss {figures['loss']:.4f}, perplexity {figures['perplexity']:.4g}" + (f", {size:.4f} bits per byte" if size else "")
    answers = f"; {figures['exact_match']:.1%} of {figures['sequences']:,} exact matches" if "exact_match" in figures else ""
    return f"step {figures['step']}: {known} over {figures['tokens']:,} tokens of {read}{answers}"
