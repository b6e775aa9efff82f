"""``trireme search``: finds the best candidates with few measured trials, on a cluster or in a table of published ones."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli import calibrate, recipes
from launcher.cli.console import emit
from launcher.cli.launching import add_detach, check_detach, first_word
from launcher.cli.on_cluster import alone, name_of_search, recipe_path, say, searched
from launcher.cli.overrides import NamedOption, add_overrides, goal_asked, typed
from launcher.cli.parser import VerbParser
from launcher.goals.views import Answer
from launcher.named_files import check_file, check_folder, write_named
from trainer.shared.run.errors import ConfigError

if TYPE_CHECKING:
    from launcher.config import Config
    from launcher.goals.goal import Asked, Goal, GoalSearch, Wanted, Written
    from launcher.sweep.search import SearchOutcome


DESCRIPTION = """\
Predicts every layout, runs the most promising first, stops a trial as soon as its steps show that it cannot win, ends one whose step
time is known (search.enough), corrects the cost model by the measurements, and ends when the probability that any untried layout is faster
than the best by more than search.tolerance (2 %) is below search.doubt (10 %), or at search.max_trials, search.max_gpu_hours or
search.max_hours. Trials use as few nodes as keep the layout's structure; the best are measured again at full size, and once more where
noise leaves open which of them is faster. The winner becomes a recipe. It can be stopped at any time: the same command continues. Values
of layout keys (layout.tensor=2,4) keep the search to layouts that have them.

With task=inference the search is for the front of time against cost of a served model (workload=..., sla.*, serving.*): trials run this
project's generator; three ways to serve are recommended, each with its command and recipe.

With goal=loss the search is for the arm (optimizer, schedule, batch) that reaches search.target_loss soonest; it is named if search.seeds
runs of each tell it from all others.

With --replay the sweeps of a table of measured trials (published format) stand for the cluster; of a table of inference the search is for
the front of time against cost.

examples:
  trireme search model=gpt_mini cluster.gpus_per_node=4 run.global_batch=16 hardware=mine
  trireme search recipe=gpt3_20b cluster=slurm search.max_gpu_hours=200
  trireme search task=inference model=gpt_tiny workload=nemo hardware=mine sla.latency_ms=500
  trireme search goal=loss search=mine run.eval_every=10 data.held_out=0.02
  trireme search --replay published/training.csv
"""


def main(argv: list[str]) -> int:
    """Returns 0 if a measured candidate can be recommended, else 1; raises ``Interrupted`` after it has shown partial results."""
    arguments = parser().parse_intermixed_args(argv)
    from launcher.config import compose
    from launcher.goals.goal import Asked

    check_detach(arguments.detach, replay=arguments.replay, json=arguments.json)
    if arguments.replay is not None:
        return replay(arguments)
    first_word()
    if arguments.only is not None:
        raise ConfigError(f"--only={arguments.only} names sweeps of a table; give the table with --replay")
    goal, config, wanted = goal_asked(arguments.overrides, arguments.config_dir)
    asked = Asked(arguments.overrides, lambda words: compose(words, arguments.config_dir))
    return run(goal, config, compose(alone(config), arguments.config_dir), asked, wanted, arguments.json, arguments.detach)


def parser() -> VerbParser:
    made = VerbParser("trireme search", DESCRIPTION)
    add_overrides(made)
    made.add_argument("--replay", action=NamedOption, metavar="CSV", help="search this table's sweeps, not a cluster (in a checkout)")
    made.add_argument("--only", action=NamedOption, metavar="TEXT", help="replay: only sweeps whose name contains this")
    made.add_argument("--json", action="store_true", help="one JSON document on standard output")
    add_detach(made)
    return made


def replay(arguments: argparse.Namespace) -> int:
    """Searches the sweeps of a table: ``benchmarks.replay`` does, which is part of the repository and of no installed package."""
    try:
        from benchmarks.replay.table import replay
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("benchmarks"):
            raise
        raise ConfigError(
            f"--replay={arguments.replay} is searched by benchmarks/ of Trireme's repository, which is not installed; run it in a checkout"
        ) from None
    return replay(arguments)


def sweep(context: Any, base: Any, arguments: Sequence[str]) -> int:
    """Searches among the values that ``arguments`` give to layout keys, all else fixed, for Hydra's sweeper plugin."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from launcher.config import to_config
    from launcher.config.compose import plain_errors
    from launcher.goals.goal import Asked, goal_of
    from launcher.planning.layout_filter import columns_wanted, from_layout

    with plain_errors():
        parsed = list(zip(arguments, OverridesParser.create().parse_overrides(list(arguments)), strict=True))
        swept = {o.key_or_group: [typed(value) for value in o.sweep_iterator()] for _, o in parsed if o.is_sweep_override()}
        others = [text for text, o in parsed if not o.is_sweep_override()]
        config = to_config(context.config_loader.load_sweep_config(base, others))
        default = to_config(context.config_loader.load_sweep_config(base, alone(config)))
    wanted = from_layout(config.layout, columns_wanted(swept)) if swept else {}
    asked = Asked(list(arguments), lambda words: to_config(context.config_loader.load_sweep_config(base, list(words))))
    return run(goal_of(config.task, config.goal), config, default, asked, wanted)


def run(goal: Goal, config: Config, default: Config, asked: Asked, wanted: Wanted, as_json: bool = False, detach: bool = False) -> int:
    """Searches and reports. ``default`` is composed from no more than ``alone``; ``wanted`` keeps only layouts with given values."""
    from launcher.sweep.at_work import Command
    from launcher.sweep.multirun import dir_option
    from launcher.trials.store import Store

    check_detach(detach, dry_run=config.dry_run)
    overrides = asked.overrides
    goal.check(config)
    name = name_of_search(config, overrides)
    paths = {key: recipe_path(f"{config.search.recipe or name}{end}") for key, end in goal.recipes.items()}
    for path in paths.values():
        check_file(path, "search.recipe")
    check_folder(config.sweep.dir, "sweep.dir")
    command = Command(config.sweep.dir, name, config.sweep.notify)
    search = goal.search(config, wanted, asked)
    say(f"search {name}: {search.size()}")
    if not config.dry_run:
        ask(search.most_gpu_hours(), config)
    if detach:
        command.detach(dir_option(config.sweep.dir))
    with command:
        found = searched(
            name, search.problem, overrides, lambda *trial: say(search.line(*trial)),
            lambda found: Store(config.sweep.dir).write_front(name, front) if found.trials and (front := search.front(found)) else None,
            command,
        )  # fmt: skip
        if found is None:
            return 0
        document = search.document(name, found, write(name, search, found, paths, default, overrides))
        emit(Answer(document, goal.shown(document)), as_json)
        if found.interrupted:
            raise found.interrupted
    return 0 if search.won(found) and not found.unfinished else 1


def ask(most: float | None, config: Config) -> None:
    """Says the GPU-hours that a search takes at most, and asks where they exceed ``sweep.confirm_gpu_hours``."""
    from launcher.sweep.bill import Bill, confirm

    price = config.cluster.price_per_gpu_hour
    bill = Bill(most or 0.0, 0.0, None if most is None or price is None else most * price, int(most is None))
    confirm(bill, config.sweep.confirm_gpu_hours, "at most")


def write(
    name: str, search: GoalSearch, found: SearchOutcome[Any], paths: Mapping[str, Path], default: Config, overrides: Sequence[str]
) -> Written:
    """Writes the calibration, and the recommended recipes of a finished search."""
    from launcher.goals.goal import Written

    config = search.problem.config
    made = {} if found.unfinished else search.recipes(found, default)
    for key, (recipe, what) in made.items():
        recipes.write(paths[key], recipe, f"Found by 'trireme search {shlex.join(overrides)}' (sweep {name}): {what}.", "search.recipe")
    folder, files = next(iter(paths.values())).with_suffix(".winner"), search.files(name, found) if made else {}
    for file, text in files.items():
        write_named(folder / file, text, "search.recipe")
    learnt = calibrate.keep(name, config.sweep.dir, config.cluster.hardware) if search.teaches and search.won(found) else None
    return Written({key: paths[key] for key in made}, folder / "command.sh" if files else None, learnt)
