"""``trireme search``: find the fastest layout with few measured trials, on a cluster or in a table of published ones."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.console import Column, fitted_table, wide_console
from launcher.cli.on_cluster import FOLDER, alone, name_of_search, recipe_path, say, searched, tell_result
from launcher.cli.overrides import NamedOption, add_overrides, check_task, layouts_asked, typed
from launcher.labels import error_of, interval, percent, plural, seconds
from launcher.named_files import check_file, check_folder, write_named
from trainer.shared.records.outcome import Reason
from trainer.shared.run.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from launcher.config import Config
    from launcher.search.policy import Policy, SearchTrial, TrialObservation
    from launcher.search.problem import SearchProblem
    from launcher.sweep.search import SearchOutcome
    from launcher.trials.store import Record

DESCRIPTION = """\
Predicts every layout, runs the most promising first, gives a trial up as soon as its steps show that it cannot win, ends one whose step
time is known (search.enough), corrects the cost model by what was measured, and ends when the probability that any untried layout is faster
than the best by more than search.tolerance (2 %) is below search.doubt (10 %), or at search.max_trials, search.max_gpu_hours or
search.max_hours. Trials use as few nodes as keep the layout's structure; the best are measured again at full size, and once more where
noise leaves open which of them is faster. The winner becomes a recipe. It can be stopped at any time: the same command continues. Values
of layout keys (layout.tensor=2,4) keep the search to layouts that have them.

With task=inference the search is for the front of time against cost of a served model (workload=..., sla.*, serving.*): trials run this
project's generator; three ways to serve are recommended, each with its command and recipe.

With --replay the sweeps of a table of measured trials (published format) stand for the cluster; of a table of inference the search is for
the front of time against cost.

examples:
  trireme search model=gpt_mini cluster.gpus_per_node=4 run.global_batch=16 hardware=mine
  trireme search recipe=gpt3_20b cluster=slurm search.max_gpu_hours=200
  trireme search task=inference model=gpt_tiny workload=nemo hardware=mine sla.latency_ms=500
  trireme search --replay published/training.csv
"""


def main(argv: list[str]) -> int:
    """0 when a layout was measured, 1 when none ran; ``Interrupted`` after what was found by then is shown."""
    arguments = parser().parse_intermixed_args(argv)
    from launcher.config import compose

    if arguments.replay is not None:
        return replay(arguments)
    if arguments.only is not None:
        raise ConfigError(f"--only={arguments.only} names sweeps of a table; give the table with --replay")
    wanted, others = layouts_asked(arguments.overrides)
    config = compose(others, arguments.config_dir)
    check_task(config, arguments.overrides)
    if config.task == "inference":
        from launcher.cli.search_inference import run as run_inference

        default = compose(alone(config), arguments.config_dir)
        return run_inference(config, default, arguments.overrides, wanted, as_json=arguments.json)
    return run(config, compose(alone(config), arguments.config_dir), arguments.overrides, wanted, as_json=arguments.json)


def replay(arguments: argparse.Namespace) -> int:
    """Searches the sweeps of a table: ``benchmarks.replay`` does, which is part of the repository and of no installed package."""
    try:
        from benchmarks.replay.table import replay
    except ImportError:
        raise ConfigError(
            f"--replay={arguments.replay} is searched by benchmarks/ of Trireme's repository, which is not installed; run it in a checkout"
        ) from None
    return replay(arguments)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("trireme search", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_overrides(made)
    made.add_argument("--replay", action=NamedOption, metavar="CSV", help="search this table's sweeps, not a cluster (in a checkout)")
    made.add_argument("--only", action=NamedOption, metavar="TEXT", help="replay: only sweeps whose name contains this")
    made.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return made


# ---------------------------------------------------------------------------------------------------- on a cluster


def sweep(context: Any, base: Any, arguments: Sequence[str]) -> int:
    """What Hydra's sweeper plugin does: search among the values that ``arguments`` give to layout keys, all else fixed."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from launcher.config import to_config
    from launcher.config.compose import plain_errors
    from launcher.planning.layout_filter import columns_wanted, from_layout

    with plain_errors():
        parsed = list(zip(arguments, OverridesParser.create().parse_overrides(list(arguments)), strict=True))
        swept = {o.key_or_group: [typed(value) for value in o.sweep_iterator()] for _, o in parsed if o.is_sweep_override()}
        others = [text for text, o in parsed if not o.is_sweep_override()]
        config = to_config(context.config_loader.load_sweep_config(base, others))
        default = to_config(context.config_loader.load_sweep_config(base, alone(config)))
    return run(config, default, list(arguments), from_layout(config.layout, columns_wanted(swept)) if swept else None)


def run(
    config: Config, default: Config, overrides: Sequence[str], wanted: Mapping[str, list[Any]] | None = None, as_json: bool = False
) -> int:
    """Search and report. ``default`` is composed from no more than ``alone``; ``wanted`` keeps only layouts with given values, by
    column."""
    from launcher.cli import calibrate
    from launcher.config import check_launchable, locate_data
    from launcher.planning.layout_filter import widen_space
    from launcher.planning.plan import plan
    from launcher.search.problem import search_problem

    check_launchable(config)
    name = name_of_search(config, overrides)
    path = recipe_path(config.search.recipe or name)
    check_file(path, "search.recipe")
    check_folder(config.sweep.dir, "sweep.dir")
    asked, config = config, locate_data(config)
    planned = plan(config, widen_space(wanted or {}, config.search.space), wanted)
    candidates = search_problem(config, planned)
    say(f"search {name}: {len(planned.space.table):,} layouts, {len(candidates.candidates):,} of them candidates")
    found = searched(name, candidates, overrides, lambda *trial: say(line(candidates, *trial)))
    if found is None:
        return 0
    won = bool(found.policy.ranking()) and not found.unfinished
    if won:
        write_recipe(path, name, candidates, found, asked, default, overrides)
        command = write_command(path.with_suffix(".winner"), name, candidates, found)
    learnt = calibrate.keep(name, config.sweep.dir, config.cluster.hardware) if found.policy.ranking() else None
    result = document(name, candidates, found, len(planned.space.table), path if won else None) | {
        "learnt": str(learnt) if learnt else None,
        "command": str(command) if won and command else None,
    }
    tell_result(found, result, None if as_json else show)
    return 0 if won else 1


def line(candidates: SearchProblem, trial: SearchTrial, record: Record, measured: TrialObservation) -> str:
    """One trial as it ends."""
    from launcher.planning.layout_names import name_of

    predicted = float(candidates.predicted(trial)[0].sum())
    took = f"{measured.seconds:.4g} s a step" if measured.ran else measured.reason.value
    early = " (given up: cannot win)" if measured.ran and record.reason is Reason.CANNOT_WIN else ""
    early = f" ({record.detail})" if record.reason is Reason.MEASURED else early
    return f"{record.id}  {name_of(candidates.trial_config(trial).layout)}: {took}, predicted {predicted:.4g} s{early}"


def document(name: str, candidates: SearchProblem, found: SearchOutcome[Policy], layouts: int, recipe: Path | None) -> dict[str, Any]:
    """What a search found, as ``--json`` prints it: the ranking, predicted against measured, what it cost and what the grid would have."""
    from launcher.planning.layout_names import name_of

    failures = [
        {"layout": name_of(candidates.trial_config(t).layout), "reason": m.reason.value, "detail": r.detail, "trial": r.id}
        for t, r, m in found.trials
        if not m.ran
    ]
    return {
        "search": name,
        "reason": found.reason,
        "doubt": found.doubt,
        "likeliest": None if found.likeliest is None else name_of(candidates.layout(found.likeliest)),
        "interrupted": found.unfinished,
        "ranking": ranking(candidates, found),
        "failed": failures,
        "other_losses": other_losses(candidates, found),
        "trials": found.policy.trials,
        "layouts": layouts,
        "candidates": len(candidates.candidates),
        "gpu_hours": found.policy.gpu_hours,
        "grid_gpu_hours": found.policy.grid_gpu_hours(candidates.config.run.steps, candidates.config.cluster.world_size),
        "recipe": str(recipe) if recipe else None,
    }


def other_losses(candidates: SearchProblem, found: SearchOutcome[Policy]) -> list[dict[str, Any]]:
    """Trials that do not train what the others train. Where most trials agree they cannot win; where not, nobody knows which are right."""
    from launcher.planning.layout_names import name_of
    from launcher.sweep.search import compared_losses

    return [
        {"layout": name_of(candidates.layout(index)), "trial": one.trial, "step_time_s": one.step_time_s, "loss_gap": one.loss_gap,
         "cannot_win": index in found.policy.strangers}
        for index, one in compared_losses(found.trials)
        if one.other_model
    ]  # fmt: skip


def ranking(candidates: SearchProblem, found: SearchOutcome[Policy]) -> list[dict[str, Any]]:
    """What is known of each layout that ran, the fastest first."""
    from launcher.planning.layout_names import name_of

    policy, chances = found.policy, found.policy.fastest()
    low, high = policy.time.posterior().interval
    trials = {trial.index: record.id for trial, record, _ in found.trials}
    return [
        {
            "layout": name_of(candidates.layout(index)),
            "step_time_s": policy.seconds_of(index),
            "full_size": index in policy.verified,
            "predicted_s": float(candidates.candidates.seconds[index]),
            "corrected_s": policy.believed(index),
            "interval_s": [float(low[index]), float(high[index])],
            "fastest": float(chances[index]),
            "trial": trials[index],
        }
        for index in policy.ranking()
    ]


def show(result: dict[str, Any]) -> None:
    """The same for people."""
    console, ranking = wide_console(), result["ranking"]
    errors = [percent(error_of(row["predicted_s"], row["step_time_s"]), signed=True) for row in ranking]
    columns = [
        Column("#", [str(place) for place in range(1, len(ranking) + 1)]),
        Column("layout", [row["layout"] for row in ranking], least=18),
        Column("step", [seconds(row["step_time_s"]) for row in ranking], right=True),
        Column("predicted", [seconds(row["predicted_s"]) for row in ranking], keep=1, right=True),
        Column("error", errors, keep=3, right=True),
        Column("80 % now", [interval((row["interval_s"][0], row["interval_s"][1])) for row in ranking], keep=5, right=True),
        Column("fastest", [percent(row["fastest"]) for row in ranking], keep=1, right=True),
        Column("size", ["full" if row["full_size"] else "scaled up" for row in ranking], keep=4),
        Column("trial", [row["trial"] for row in ranking], keep=2),
    ]
    console.print(fitted_table(columns, console.width, [""] * len(ranking)))
    for row in result["failed"]:
        console.print(f"{row['trial']}  {row['layout']}: {row['reason']} {row['detail']}".rstrip(), markup=False)
    for row in result["other_losses"]:
        end = "it does not train the same model and cannot win" if row["cannot_win"] else "most trials disagree: see what their logs print"
        console.print(
            f"{row['trial']}  {row['layout']}: {seconds(row['step_time_s'])} a step, losses of the first steps differ by "
            f"{percent(row['loss_gap'])}: {end}",
            markup=False,
        )
    share = result["gpu_hours"] / result["grid_gpu_hours"] if result["grid_gpu_hours"] else 0.0
    console.print(
        f"{plural(result['trials'], 'trial')} of {result['layouts']:,} layouts, {result['gpu_hours']:.3g} GPU-hours; "
        f"all candidates would take about {result['grid_gpu_hours']:.3g} ({percent(share)})"
    )
    console.print(f"stopped: {result['reason']}")
    if result["doubt"] is not None and result["doubt"] > 0 and "probability" not in result["reason"]:
        console.print(
            f"left open: an untried layout is faster by more than the tolerance with a probability of {percent(result['doubt'])}; "
            f"the likeliest is {result['likeliest']}"
        )
    show_files(console, result)


def show_files(console: Console, result: dict[str, Any]) -> None:
    """What the search has written, and the command that takes each up."""
    if result["learnt"]:
        file = Path(result["learnt"])
        console.print(
            f"what it learnt of this machine is in {file}: the next search starts from it with hardware={file.stem}", soft_wrap=True
        )
    if result["recipe"]:
        name = Path(result["recipe"]).relative_to(FOLDER).with_suffix("")
        console.print(f"the winner is a recipe, {result['recipe']}: trireme train recipe={name}", soft_wrap=True)
    if result["command"]:
        console.print(f"\n{Path(result['command']).read_text()}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"the winner in the trainer's own words: {result['command']}", soft_wrap=True)


def write_recipe(
    path: Path, name: str, candidates: SearchProblem, found: SearchOutcome[Policy], asked: Config, default: Config, overrides: Sequence[str]
) -> None:
    """The winner of the search ``name``: ``asked`` in the layout that was measured fastest."""
    from launcher.cli import recipes
    from launcher.config.hardware import hardware_files
    from launcher.planning.recipe import recipe

    winner = found.policy.ranking()[0]
    made = recipe(dataclasses.replace(asked, layout=candidates.layout(winner)), default, hardware_files())
    took = f"{seconds(found.policy.seconds_of(winner))} a step, the fastest of {plural(found.policy.trials, 'trial')}"
    recipes.write(path, made, f"Found by 'trireme search {shlex.join(overrides)}' (sweep {name}): {took}.", "search.recipe")


def write_command(folder: Path, name: str, candidates: SearchProblem, found: SearchOutcome[Policy]) -> Path | None:
    """The winner as another trainer is told it, in ``folder``: its ``command.sh``. None for this project's trainer."""
    from launcher.config import resolve
    from launcher.config.command import command_of
    from launcher.planning.layout_names import name_of
    from launcher.trials.told import as_files

    winner = found.policy.ranking()[0]
    config = resolve(dataclasses.replace(candidates.config, layout=candidates.layout(winner)))
    command = command_of(config)
    if command is None:
        return None
    took = f"{name_of(config.layout)}: {seconds(found.policy.seconds_of(winner))} a step in {config.run.steps} steps of search {name}"
    for file, text in as_files(command, config.layout, config.cluster.gpus_per_node, took).items():
        write_named(folder / file, text, "search.recipe")
    return folder / "command.sh"
