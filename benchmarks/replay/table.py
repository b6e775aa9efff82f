"""``trireme search --replay TABLE.csv``: searches every sweep, or every grid of inference, of a table of measured runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.replay.fronts import FrontReplay, grids, replay_front
from benchmarks.replay.trials import Replay, tables
from benchmarks.replay.trials import replay as replay_table
from launcher.cli.console import Column, fitted_table, wide_console
from launcher.cli.overrides import key_of
from launcher.config import Config, compose
from launcher.config.hardware import hardware_files
from launcher.labels import percent, plural
from launcher.tables import inference
from launcher.tables.canonical import read
from launcher.tables.validation import check_units, judge
from trainer.shared.run.errors import ConfigError, listed

WITHIN = 0.03
"""A front of inference counts as found when it is within this fraction of the true one, in time and in cost."""

REPLAYED = (
    "search",
    "search.tolerance",
    "search.doubt",
    "search.max_trials",
    "search.max_gpu_hours",
    "search.start_s",
    "search.enough",
    "run.steps",
    "run.warmup_steps",
    "trainer",
)
"""Keys that a search of measured trials has a use for: all else is in the table."""


def replay(arguments: argparse.Namespace) -> int:
    """Searches every sweep of a CSV file. 0 when a layout was measured in one of them, else 1."""
    if strange := [word for word in arguments.overrides if key_of(word) not in REPLAYED]:
        raise ConfigError(
            f"{strange[0]} changes nothing in a search of measured trials (--replay); keys that do are {listed(REPLAYED[1:])}"
        )
    config = compose(arguments.overrides, arguments.config_dir)
    if inference.is_inference(arguments.replay):
        return replay_inference(config, arguments)
    chosen = config.trainer if any(key_of(word) == "trainer" for word in arguments.overrides) else None
    rows, files = read(arguments.replay), hardware_files()
    check_units(judge(rows, files, chosen))
    found = [t for t in tables(rows, files, chosen) if (arguments.only or "").lower() in t.name.lower()]
    if not found:
        raise ConfigError(
            f"{arguments.replay} holds no sweep to search"
            + (f" whose name contains {arguments.only!r}" if arguments.only else "")
            + ": that is at least 5 measured rows of one source, model, sequence length, GPU and number of GPUs, with 3 different layouts"
        )
    replays = [replay_table(table, config.search, config.run.steps, config.run.warmup_steps) for table in found]
    if arguments.json:
        print(json.dumps([replayed(each) for each in replays], indent=2, allow_nan=False))
    else:
        show_replays(replays)
    return 0 if any(each.behind is not None for each in replays) else 1


def replay_inference(config: Config, arguments: argparse.Namespace) -> int:
    """Searches every grid of a table of inference for its front. 0 when a front was found within ``WITHIN``, else 1."""
    wanted = (arguments.only or "").lower()
    named = {name: rows for name, rows in grids(inference.read(arguments.replay)).items() if wanted in name.lower()}
    settings, files = config.search, hardware_files()
    made = (replay_front(name, rows, files, WITHIN, settings.tolerance, settings.max_trials) for name, rows in named.items())
    found = [each for each in made if each is not None]
    if not found:
        raise ConfigError(
            f"{arguments.replay} holds no grid to search"
            + (f" whose name contains {arguments.only!r}" if arguments.only else "")
            + ": that is at least 8 measured rows of one model, device, engine and pair of lengths, with different layouts"
        )
    if arguments.json:
        print(json.dumps([dataclasses.asdict(each) | {"until_within": each.until_within} for each in found], indent=2, allow_nan=False))
    else:
        show_fronts(found)
    return 0 if any(each.until_within is not None for each in found) else 1


def show_fronts(replays: Sequence[FrontReplay]) -> None:
    """One line per grid."""
    share = percent(WITHIN, digits=0)
    heads = ("grid", "rows", "front", "named", f"within {share}", "measured", "behind", "behind unmeasured", "random order")
    made = Table(*heads, box=box.SIMPLE_HEAD, pad_edge=False)
    for each in replays:
        until = "never" if each.until_within is None else str(each.until_within)
        cells = (
            str(each.rows),
            str(each.front),
            str(each.named),
            until,
            str(each.measured),
            percent(each.behind[-1]),
            percent(each.behind[0]),
        )
        made.add_row(each.name, *cells, f"{each.random_order:g}")
    wide_console().print(made)


def replayed(each: Replay) -> dict[str, Any]:
    return {
        **{key: getattr(each, key) for key in ("name", "rows", "ran", "trials_to_best", "grid_gpu_hours", "reason", "doubt")},
        "behind_best": each.behind,
        "gpu_hours": each.gpu_hours,
        "trials": [dataclasses.asdict(step) for step in each.steps],
    }


def show_replays(replays: Sequence[Replay]) -> None:
    """One line per sweep, and the means."""
    console = wide_console()
    figures = {
        "rows": [str(each.rows) for each in replays],
        "ran": [str(each.ran) for each in replays],
        "to best": ["never" if each.trials_to_best is None else str(each.trials_to_best) for each in replays],
        "trials": [str(len(each.steps)) for each in replays],
        "behind best": [percent(each.behind) for each in replays],
        "GPU-hours": [f"{each.gpu_hours:.4g}" for each in replays],
        "of the grid": [percent(each.gpu_hours / each.grid_gpu_hours) for each in replays],
    }
    names = Column("sweep", [each.name for each in replays], least=15)
    columns = [names, *(Column(head, cells, right=True) for head, cells in figures.items())]
    console.print(fitted_table(columns, console.width, [""] * len(replays)))
    reached = [each.trials_to_best for each in replays if each.trials_to_best is not None]
    spent, grid = sum(each.gpu_hours for each in replays), sum(each.grid_gpu_hours for each in replays)
    after = f", after {sum(reached) / len(reached):.1f} trials on average" if reached else ""
    console.print(
        f"{plural(len(replays), 'sweep')}; within {percent(replays[0].tolerance, digits=0)} of the best in {len(reached)}{after}; "
        f"{sum(len(each.steps) for each in replays) / len(replays):.1f} trials until the search stops; "
        f"{spent:.4g} of {grid:.4g} GPU-hours ({percent(spent / grid)})"
    )
