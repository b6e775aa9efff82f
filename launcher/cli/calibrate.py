"""``trireme calibrate``: correct the cost model's constants by measured runs, into a hardware file that predictions use."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.console import wide_console
from launcher.cli.machines import FOLDER, target, write
from launcher.cli.overrides import NamedOption, add_folder
from launcher.cli.parser import VerbParser
from launcher.cli.rank import repeated, table_rows
from launcher.cli.repeats import MEDIAN, warn
from launcher.labels import percent, plural, shown
from launcher.named_files import check_file
from trainer.shared.run.errors import ConfigError, listed, nearest
from trainer.shared.run.read import to_dict

if TYPE_CHECKING:
    from launcher.config.hardware import HardwareFiles
    from launcher.config.schema import HardwareConfig
    from launcher.tables.canonical import MeasuredRun
    from launcher.tables.learning import CalibrationResult


DESCRIPTION = """\
Learns from one, three, many measured runs of one machine what the cost model's constants are there: a Bayesian update whose prior is the
shipped constants and how far they were off elsewhere, or an earlier calibration. The runs are a sweep of this project, or a canonical table
of any trainer ('trireme validate --columns'). A run counts once, also if it is given again.

The file goes to runs/hardware/NAME.yaml, or DIR/hardware/NAME.yaml with --config-dir: 'hardware=NAME' predicts with it, everywhere, with
narrower intervals. --show says in words what a file has learnt.

examples:
  trireme calibrate                            the newest sweep
  trireme calibrate sweep-1f2e3d4c --out desk
  trireme calibrate runs.csv --out cluster
  trireme calibrate --show cluster
"""
REACHED = {
    "network": "collectives over the network reach {} of what the data sheet says",
    "link": "collectives inside a node reach {} of what the data sheet says",
    "bandwidth": "memory-bound operations reach {} of the memory bandwidth",
    "streaming": "additions of long arrays reach {} of the memory bandwidth",
    "data_hidden": "{} of the communication of data parallelism is hidden where it can be",
    "tensor_hidden": "{} of the communication of tensor parallelism is hidden where it can be",
    "sends_hidden": "{} of the transfers between pipeline ranks is hidden where sends do not block",
    "wave_weight": "{} of an incomplete last wave of tiles is lost",
}
"""Constants that are shares, in words."""
SAID = 0.9
"""A constant counts as learnt if its spread falls below this share of the prior's."""


def main(argv: list[str]) -> int:
    """0 when a file was written or shown."""
    arguments = parser().parse_args(argv)
    from launcher.config.hardware import hardware_files
    from launcher.tables.canonical import read
    from launcher.tables.repeats import of_rows
    from launcher.tables.validation import check_units, judge

    if arguments.show is not None:
        return show_file(arguments.show, arguments.config_dir, arguments.json)
    files, runs = hardware_files(arguments.config_dir), arguments.runs
    is_table = runs is not None and (runs.endswith(".csv") or Path(runs).is_file())
    rows = read(runs) if is_table else sweep_rows(runs, arguments.dir)
    base = machine_of_rows(rows, files)
    if is_table:
        check_units(judged := judge(rows, files))
        warn(of_rows(each.case for each in judged if each.case is not None), MEDIAN)
    name = f"{base}_calibrated" if arguments.out is None else arguments.out
    path = target(name, "--out", FOLDER if arguments.config_dir is None else arguments.config_dir / "hardware")
    if path.exists():
        raise ConfigError(f"--out={name}: {path} already exists and will not be overwritten; choose another --out or delete it")
    check_file(path, "--out")
    lesson = lesson_of(rows, files[base], name)
    write(path, lesson.hardware, f"Learnt by 'trireme calibrate' from {lesson.counted} of {base}.", "--out")
    if arguments.json:
        print(json.dumps(document(lesson, path), indent=2, allow_nan=False))
    else:
        show(lesson, path)
    return 0


def parser() -> VerbParser:
    made = VerbParser("trireme calibrate", DESCRIPTION)
    made.add_argument("runs", nargs="?", metavar="SWEEP|TABLE.csv", help="measured runs (default: the newest sweep)")
    made.add_argument(
        "--out", action=NamedOption, metavar="NAME", help="name of the file, for hardware=NAME (default: HARDWARE_calibrated)"
    )
    made.add_argument("--show", action=NamedOption, metavar="NAME", help="describe the calibration in the hardware file NAME, and stop")
    made.add_argument("--dir", action=NamedOption, default="runs", help="folder of all trials and sweeps (default: %(default)s)")
    add_folder(made, "folder of config groups of your own: the file goes to DIR/hardware")
    made.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return made


def sweep_rows(name: str | None, folder: str) -> list[MeasuredRun]:
    """The trials of a sweep as rows of a canonical table."""
    from launcher.results.measurements import measure
    from launcher.results.ranking import rank
    from launcher.tables.canonical import MeasuredRun
    from launcher.trials.store import Store

    sweep = Store(folder).sweep(name)
    ranked = rank(measure(sweep.records))
    warn(repeated(sweep, ranked), MEDIAN)
    return [MeasuredRun(number, cells) for number, cells in enumerate(table_rows(sweep, ranked), 1)]


def machine_of_rows(rows: Sequence[MeasuredRun], known: HardwareFiles) -> str:
    """The hardware file of all rows with a step time. ``ConfigError`` where there is none, or more than one."""
    timed = [row for row in rows if row.step_seconds]
    if not timed:
        raise ConfigError("no run has a step time, so there is nothing to learn; give a sweep with a trial that ended, or such a table")
    if unnamed := [row.number for row in timed if row["hardware"] is None]:
        raise ConfigError(f"row {unnamed[0]} has hardware=unknown, so nobody knows what it teaches; name a hardware file, or leave it out")
    names = list(dict.fromkeys(str(row["hardware"]) for row in timed))
    if len(names) > 1:
        raise ConfigError(f"the runs are of several machines ({', '.join(names)}), and a file describes one; give those of one")
    if names[0] not in known:
        raise ConfigError(
            f"the runs are of hardware={names[0]}, which has no file{nearest(names[0], known)}; describe it (docs: "
            f"hardware), or measure it with "
            "'trireme doctor', and train with hardware=NAME"
        )
    return names[0]


def lesson_of(rows: Sequence[MeasuredRun], hardware: HardwareConfig, name: str) -> CalibrationResult:
    """Calibrates ``hardware`` with ``rows``. Raises ``ConfigError`` if the cost model cannot predict any."""
    from launcher.tables.canonical import Unanswerable
    from launcher.tables.cases import table_case
    from launcher.tables.learning import learn

    cases, reasons = [], []
    for row in rows:
        try:
            cases.append(table_case(row, {row["hardware"]: hardware}))
        except Unanswerable as why:
            reasons.append(f"row {row.number}: {why}")
    if not cases:
        raise ConfigError(f"the cost model can say nothing of these runs ({reasons[0]}); fill in the missing cells")
    return learn(cases, hardware, name)


def document(lesson: CalibrationResult, path: Path) -> dict[str, Any]:
    """Returns the document of ``--json``."""
    import numpy as np

    errors = {name: float(np.median(abs(np.expm1(values)))) for name, values in (("before", lesson.before), ("after", lesson.after))}
    return {
        "file": str(path),
        "runs": len(lesson.before),
        "without_repeats": lesson.different,
        "median_error": errors,
        "hardware": to_dict(lesson.hardware),
    }


def show(lesson: CalibrationResult, path: Path) -> None:
    """Prints the calibration."""
    import numpy as np

    console = wide_console()
    before, after = (float(np.median(abs(np.expm1(each)))) for each in (lesson.before, lesson.after))
    for line in words(lesson.hardware):
        console.print(line, soft_wrap=True)
    console.print(f"{lesson.counted}: predictions were {percent(before)} off in the median, and are {percent(after)} off now")
    console.print(f"written to {path}; use it: trireme plan hardware={path.stem} ...", soft_wrap=True)


def show_file(name: str, folder: Path | None, as_json: bool) -> int:
    """Returns the calibration in the hardware file ``name``. Raises ``ConfigError`` without one."""
    from launcher.config import compose
    from launcher.config.compose import config_groups
    from launcher.tables.learning import as_id

    known = config_groups(folder).get("hardware", [])
    if name not in known:
        raise ConfigError(f"--show={name} is not a hardware file{nearest(name, known)}; there are {listed(known)}")
    hardware = compose([f"hardware={name}"], folder).cluster.hardware
    if not hardware.learnt:
        raise ConfigError(f"--show={name} has learnt nothing from runs; 'trireme calibrate SWEEP --out NAME' writes a file that has")
    if as_json:
        learnt = hardware.learnt | {"runs": [as_id(each) for each in hardware.learnt.get("runs", [])]}
        print(json.dumps(to_dict(hardware) | {"learnt": learnt}, indent=2, allow_nan=False))
        return 0
    for line in words(hardware):
        print(shown(line))
    return 0


def words(hardware: HardwareConfig) -> list[str]:
    """Lists a file's calibrated constants, one sentence each, the surest first; omits unaffected ones."""
    from launcher.config.constants import constant_entries
    from launcher.config.uncertainty import shipped_widths, widths_on
    from launcher.cost.inputs.constants import SHIPPED
    from launcher.tables.learning import RATE

    learnt, factor, known = hardware.learnt, hardware.time_factor, shipped_widths().constant * SAID
    widths = widths_on(learnt)
    lines = [f"learnt from {plural(len(learnt.get('runs', [])), 'run')}:"]
    if abs(factor - 1) >= 0.005:
        lines.append(f"  every step takes {percent(abs(factor - 1))} {'more' if factor > 1 else 'less'} time than its parts say")
    for name, spread in sorted(learnt.get("spreads", {}).items(), key=lambda item: float(item[1])):
        if float(spread) > known:
            continue
        sure = f"give or take {percent(float(spread), digits=0)} of that"
        if name.startswith(RATE):
            precision = name.removeprefix(f"{RATE} in ")
            if precision not in hardware.sustained_tflops or precision not in hardware.peak_tflops:
                continue
            rate, peak = hardware.sustained_tflops[precision], hardware.peak_tflops[precision]
            lines.append(
                f"  large matrix products sustain {rate:.4g} TFLOP/s in {precision}, {percent(rate / peak, digits=0)} of the peak, {sure}"
            )
            continue
        if name not in constant_entries():
            continue
        usual = getattr(SHIPPED, name)
        value = hardware.constants.get(name, usual)
        form = (lambda number: percent(number, digits=0)) if name in REACHED else (lambda number: f"{number:.3g}")
        lines.append(f"  {REACHED.get(name, name + ' is {}').format(form(value))}, {sure} (elsewhere {form(usual)})")
    apart = percent(math.hypot(widths.layout, widths.rough))
    lines.append(f"  predictions are sure to {percent(widths.common)} in what all layouts share, and to {apart} between two of them")
    return lines


def keep(name: str, folder: str, hardware: HardwareConfig) -> Path | None:
    """Writes the calibration of the search ``name`` as hardware=``name``, where the next one finds it; None if it learnt nothing."""
    try:
        path = target(name, "sweep.name")
        first = f"Learnt by the search {name} "
        if path.exists() and first not in path.read_text().partition("learnt:")[0]:
            raise ConfigError(f"{path} was not written by this search and will not be overwritten; set another sweep.name")
        rows = sweep_rows(name, folder)
        lesson = lesson_of([row for row in rows if row.step_seconds], hardware, name)
        write(path, lesson.hardware, first + f"from {plural(len(lesson.before), 'trial')}.", "sweep.name")
    except ConfigError as error:
        print(f"the calibration is not saved: {error}", file=sys.stderr)
        return None
    return path
