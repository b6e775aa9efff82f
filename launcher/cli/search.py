"""``trireme search``: find the fastest layout with few measured trials, on a cluster or in a table of published ones."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.console import wide_console
from launcher.cli.layouts import layouts_asked, typed
from trainer.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from launcher.config import Config
    from launcher.search.contest import Contest
    from launcher.search.policy import Measurement, Trial
    from launcher.search.replay import Replay
    from launcher.sweep.search import Found
    from launcher.sweep.store import Record

HELP = "find the fastest layout with few measured trials"

DESCRIPTION = """\
Predicts every layout, runs the most promising first, gives a trial up as soon as its steps show that it cannot win, corrects the cost
model by what was measured, and ends when no untried layout can plausibly beat the best by more than search.tolerance (2 %), or at
search.max_trials, search.max_gpu_hours or search.max_hours. Trials use as few nodes as keep the layout's structure; the best are measured
again at full size, and once more where noise leaves open which of them is faster. The winner becomes a recipe. It can be stopped at any
time: the same command goes on. Values of layout keys (layout.tensor=2,4) keep the search to layouts that have them.

With --replay a table of measured trials (published format) stands for the cluster.

examples:
  trireme search model=gpt_mini cluster.gpus_per_node=4 run.global_batch=16 hardware=mine
  trireme search recipe=gpt3_20b cluster=slurm search.max_gpu_hours=200
  trireme search --replay published/training.csv
"""


def main(argv: list[str]) -> int:
    """0 when a layout was measured, 1 when none ran or the search was interrupted."""
    arguments = parser().parse_args(argv)
    from launcher.config import compose

    if arguments.replay:
        return replay(arguments)
    wanted, others = layouts_asked(arguments.overrides)
    return run(compose(others), compose([]), arguments.overrides, wanted, as_json=arguments.json)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("trireme search", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what differs from conf/config.yaml, in Hydra's grammar")
    made.add_argument("--replay", metavar="CSV", help="search the tables of this file in place of a cluster")
    made.add_argument("--only", metavar="TEXT", help="replay: only tables whose name contains this")
    made.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return made


# ---------------------------------------------------------------------------------------------------- on a cluster


def sweep(context: Any, base: Any, arguments: Sequence[str]) -> int:
    """What Hydra's sweeper plugin does: search among the values that ``arguments`` give to layout keys, all else fixed."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from launcher.config import to_config
    from launcher.config.compose import plain_errors
    from launcher.search.wanted import columns_wanted, fixed

    with plain_errors():
        parsed = list(zip(arguments, OverridesParser.create().parse_overrides(list(arguments)), strict=True))
        swept = {o.key_or_group: [typed(value) for value in o.sweep_iterator()] for _, o in parsed if o.is_sweep_override()}
        others = [text for text, o in parsed if not o.is_sweep_override()]
        config, default = (to_config(context.config_loader.load_sweep_config(base, words)) for words in (others, []))
    return run(config, default, list(arguments), fixed(config.layout, columns_wanted(swept)) if swept else None)


def run(
    config: Config, default: Config, overrides: Sequence[str], wanted: Mapping[str, list[Any]] | None = None, as_json: bool = False
) -> int:
    """Search and report. ``default`` is the configuration without overrides; ``wanted`` keeps only layouts with given values, by column."""
    from launcher.config import locate_data
    from launcher.results.tracking import MlflowMirror
    from launcher.search.contest import contest
    from launcher.search.plan import plan
    from launcher.search.wanted import spanning
    from launcher.sweep.dry_run import print_requests
    from launcher.sweep.multirun import sweep_name
    from launcher.sweep.search import first_points, search

    config = locate_data(config)
    planned = plan(config, spanning(wanted or {}, config.search.space), wanted)
    candidates = contest(config, planned)
    name = config.sweep.name or "search-" + sweep_name(overrides).removeprefix("sweep-")
    say(f"search {name}: {len(planned.space.table):,} layouts, {len(candidates.candidates):,} of them candidates")
    base = [word for word in overrides if not word.lstrip("+").startswith(("layout.", "search", "sweep.", "dry_run"))]
    if config.dry_run:
        print_requests(first_points(candidates, base), config.dry_run)
        return 0
    found = search(name, candidates, base, tell=lambda *trial: say(line(candidates, *trial)))
    MlflowMirror(config.sweep.dir, name).close()  # once: a mirror beside every single trial would disturb the next one
    recipe = write_recipe(name, candidates, found, default, overrides)
    result = document(name, candidates, found, len(planned.space.table), recipe)
    if as_json:
        print(json.dumps(result, indent=2, allow_nan=False))
    else:
        show(result)
    return 0 if found.policy.ranking() and not found.interrupted else 1


def line(candidates: Contest, trial: Trial, record: Record, measured: Measurement) -> str:
    """One trial as it ends."""
    from launcher.search.naming import name_of

    predicted = float(candidates.predicted(trial)[0].sum())
    took = f"{measured.seconds:.4g} s a step" if measured.ran else measured.reason.value
    given_up = " (given up: cannot win)" if measured.ran and record.reason else ""
    return f"{record.id}  {name_of(candidates.trial_config(trial).layout)}: {took}, predicted {predicted:.4g} s{given_up}"


def document(name: str, candidates: Contest, found: Found, layouts: int, recipe: Path | None) -> dict[str, Any]:
    """What a search found, as ``--json`` prints it: the ranking, predicted against measured, what it cost and what the grid would have."""
    from launcher.search.naming import name_of

    rows = []
    for index in found.policy.ranking():
        record = [r for trial, r, _ in found.trials if trial.index == index][-1]
        rows.append(
            {
                "layout": name_of(candidates.layout(index)),
                "step_time_s": found.policy.seconds_of(index),
                "full_size": index in found.policy.verified,
                "predicted_s": float(candidates.candidates.seconds[index]),
                "corrected_s": found.policy.believed(index),
                "trial": record.id,
            }
        )
    failures = [
        {"layout": name_of(candidates.trial_config(t).layout), "reason": m.reason.value, "detail": r.detail, "trial": r.id}
        for t, r, m in found.trials
        if not m.ran
    ]
    return {
        "search": name,
        "reason": found.reason,
        "interrupted": found.interrupted,
        "ranking": rows,
        "failed": failures,
        "trials": found.policy.trials,
        "layouts": layouts,
        "candidates": len(candidates.candidates),
        "gpu_hours": found.policy.gpu_hours,
        "grid_gpu_hours": found.policy.grid_gpu_hours(candidates.config.run.steps, candidates.config.cluster.world_size),
        "recipe": str(recipe) if recipe else None,
    }


def show(result: dict[str, Any]) -> None:
    """The same for people."""
    from rich import box
    from rich.table import Table

    from launcher.results.labels import error_of, percent, seconds

    console = wide_console()
    made = Table("#", "layout", "step", "predicted", "error", "size", "trial", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, row in enumerate(result["ranking"], 1):
        error = percent(error_of(row["predicted_s"], row["step_time_s"]), signed=True)
        size = "full" if row["full_size"] else "scaled up"
        made.add_row(str(place), row["layout"], seconds(row["step_time_s"]), seconds(row["predicted_s"]), error, size, row["trial"])
    console.print(made)
    for row in result["failed"]:
        console.print(f"{row['trial']}  {row['layout']}: {row['reason']} {row['detail']}".rstrip(), markup=False)
    share = result["gpu_hours"] / result["grid_gpu_hours"] if result["grid_gpu_hours"] else 0.0
    console.print(
        f"{result['trials']} trials of {result['layouts']:,} layouts, {result['gpu_hours']:.3g} GPU-hours; "
        f"all candidates would take about {result['grid_gpu_hours']:.3g} ({share:.1%})"
    )
    console.print(f"stopped: {result['reason']}")
    if result["recipe"]:
        console.print(f"the winner is a recipe: trireme train recipe={Path(result['recipe']).stem}")


def write_recipe(name: str, candidates: Contest, found: Found, default: Config, overrides: Sequence[str]) -> Path | None:
    """The winner under ``<sweep.dir>/recipe/``, where ``recipe=NAME`` finds it."""
    from launcher.cli import recipes
    from launcher.search.recipe import recipe

    config, ranking = candidates.config, found.policy.ranking()
    if not ranking or found.interrupted:
        return None
    hardware = next((o.split("=", 1)[1] for o in overrides if o.startswith("hardware=")), None)
    layout, best = candidates.layout(ranking[0]), found.policy.seconds_of(ranking[0])
    made = recipe(config.model, config.optimizer, config.run, layout, config.cluster, hardware, default)
    made["expect"] = {"step_time_s": float(f"{best:.4g}"), "tolerance": 0.05, "source": f"trireme search, sweep {name}"}
    path = Path(config.sweep.dir) / "recipe" / f"{config.search.recipe or name}.yaml"
    recipes.write(path, made, f"Found by 'trireme search {' '.join(overrides)}' with {found.policy.trials} trials.")
    return path


# ---------------------------------------------------------------------------------------------------- in a table


def replay(arguments: argparse.Namespace) -> int:
    """Search every table of a CSV file."""
    from launcher.config import compose
    from launcher.config.hardware import hardware_files
    from launcher.results.published import read
    from launcher.search.replay import replay as replay_table
    from launcher.search.replay import tables

    config = compose(arguments.overrides)
    found = [t for t in tables(read(arguments.replay), hardware_files()) if (arguments.only or "").lower() in t.name.lower()]
    if not found:
        raise ConfigError(
            f"{arguments.replay} holds no table to search"
            + (f" whose name contains {arguments.only!r}" if arguments.only else "")
            + ": that is at least 5 measured rows of one source, model, sequence length, GPU and number of GPUs, with 3 different layouts"
        )
    replays = [replay_table(table, config.search, config.run.steps, config.run.warmup_steps) for table in found]
    if arguments.json:
        print(json.dumps([replayed(each) for each in replays], indent=2, allow_nan=False))
    else:
        show_replays(replays)
    return 0


def replayed(each: Replay) -> dict[str, Any]:
    return {
        **{key: getattr(each, key) for key in ("name", "rows", "ran", "trials_to_best", "grid_gpu_hours", "reason")},
        "behind_best": each.behind if each.ran else None,
        "gpu_hours": each.gpu_hours,
        "trials": [dataclasses.asdict(step) for step in each.steps],
    }


def show_replays(replays: Sequence[Replay]) -> None:
    """One line per table, and the means."""
    from rich import box
    from rich.table import Table

    console = wide_console()
    made = Table(
        "table", "rows", "ran", "to best", "trials", "behind best", "GPU-hours", "of the grid", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for each in replays:
        share = each.gpu_hours / each.grid_gpu_hours
        to_best = "never" if each.trials_to_best is None else str(each.trials_to_best)
        behind = f"{each.behind:.1%}"
        made.add_row(
            each.name, str(each.rows), str(each.ran), to_best, str(len(each.steps)), behind, f"{each.gpu_hours:.4g}", f"{share:.1%}"
        )
    console.print(made)
    reached = [each.trials_to_best for each in replays if each.trials_to_best is not None]
    spent, grid = sum(each.gpu_hours for each in replays), sum(each.grid_gpu_hours for each in replays)
    in_mean, in_all = sum(reached) / max(len(reached), 1), sum(len(each.steps) for each in replays) / len(replays)
    console.print(
        f"{len(replays)} tables; within {replays[0].tolerance:.0%} of the best in {len(reached)}, after {in_mean:.1f} trials in the mean; "
        f"{in_all:.1f} trials until the search stops; {spent:.4g} of {grid:.4g} GPU-hours ({spent / grid:.1%})"
    )


def say(text: str) -> None:
    print(text, file=sys.stderr)
