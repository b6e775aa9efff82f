"""``trireme doctor``: measures a machine's rates and writes them into a hardware file that the cost model reads."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from launcher.cli.console import wide_console
from launcher.cli.machines import target, write
from launcher.cli.overrides import add_keys
from launcher.cli.parser import VerbParser
from launcher.named_files import check_file
from trainer.shared.run.read import to_dict
from trainer.shared.run.schema import DataConfig, LayoutConfig, ModelConfig

if TYPE_CHECKING:
    from launcher.config import Config
    from launcher.config.schema import HardwareConfig
    from launcher.trials.job import JobState


DESCRIPTION = """\
Measures, in a minute or so, what ranks really get: matrix products by shape and precision, memory bandwidth, what issuing an operation
costs, and collectives by size and group, inside a node and between nodes. The probe runs as ranks of a trial do, through the configured
backend: on this machine, under Slurm or in Kubernetes. Measure with as many ranks per node as you will train with: they share its
memory, its network ports and, where the ranks are CPU processes, its cores. Two nodes are enough to know the network.

The figures go to runs/hardware/NAME.yaml. From then on 'hardware=NAME' predicts with them, everywhere. hardware=FILE given here names the
device's data sheet (conf/hardware), whose peaks are kept; a GPU that is known there is found by its own name.

examples:
  trireme doctor                                              4 ranks on this machine, as hardware=mine
  trireme doctor --name desk cluster.gpus_per_node=8          8 ranks, as hardware=desk
  trireme doctor --name h100_two cluster=slurm cluster.nodes=2 cluster.gpus_per_node=8 hardware=h100
  trireme plan model=gpt_mini run.global_batch=16 hardware=mine
"""


def main(argv: list[str]) -> int:
    """0 when a file was written, 1 when the ranks failed."""
    arguments = parser().parse_intermixed_args(argv)
    from launcher.config import compose
    from launcher.config.hardware import shipped_hardware
    from launcher.cost.calibration import hardware
    from launcher.sweep.oneoff import JobError, run_job

    path = target(arguments.name, "--name")
    check_file(path, "--name")
    config = asked(compose(arguments.overrides))
    started = time.time()
    progress = Progress()
    try:
        result = run_job(config, "doctor", progress.tell)
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        progress.close()
    figures = result["probe"]
    sheet = config.cluster.hardware if config.cluster.hardware.peak_tflops else data_sheet(figures, shipped_hardware())
    found = consistent(hardware(arguments.name, figures, sheet), sheet)
    write(path, found, origin(figures, config), "--name")
    if arguments.json:
        print(json.dumps(document(found, path, time.time() - started), indent=2, allow_nan=False))
    else:
        show(found, path, time.time() - started)
    return 0


def parser() -> VerbParser:
    made = VerbParser("trireme doctor", DESCRIPTION)
    add_keys(made, "where to measure: cluster=..., cluster.nodes=..., run.device=...")
    made.add_argument("--name", default="mine", help="name of the file, for hardware=NAME (default: %(default)s)")
    made.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return made


def asked(config: Config) -> Config:
    """The run that measures: one replica per rank, so that every rank of the cluster takes part."""
    from launcher.config import resolve

    world = config.cluster.world_size
    run = dataclasses.replace(config.run, task="probe", global_batch=world)
    plain = dataclasses.replace(config, model=ModelConfig(), layout=LayoutConfig(), data=DataConfig(kind="synthetic"), run=run)
    return resolve(plain)


def data_sheet(figures: dict[str, Any], known: dict[str, HardwareConfig]) -> HardwareConfig | None:
    """The shipped file of a device that says its own name: the same first word, and as much memory."""
    size = figures["memory_bytes"]
    words = set(re.findall(r"[A-Z]+[0-9]+[A-Z]*", str(figures["device"]).upper()))
    fits = [
        sheet
        for sheet in known.values()
        if size and sheet.memory_gb and sheet.name.split("-")[0].upper() in words and abs(sheet.memory_gb * 1e9 / size - 1) < 0.1
    ]
    return fits[0] if len(fits) == 1 else None


def consistent(found: HardwareConfig, sheet: HardwareConfig | None) -> HardwareConfig:
    """Caps rates of ``found`` at their peaks: raises a measured peak, which noise may put too low, and cuts to a data ``sheet``'s."""
    peaks, reached = found.peak_tflops, found.sustained_tflops
    if sheet is None:
        peaks = {precision: max(peak, reached.get(precision, peak)) for precision, peak in peaks.items()}
    else:
        reached = {precision: min(rate, peaks.get(precision, rate)) for precision, rate in reached.items()}
    return dataclasses.replace(found, peak_tflops=peaks, sustained_tflops=reached)


def origin(figures: dict[str, Any], config: Config) -> str:
    """Returns the source of the figures."""
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    where = f"{figures['nodes']} x {figures['per_node']} ranks, {config.cluster.backend}, {when} UTC"
    return f"Measured by 'trireme doctor': {', '.join(figures['hosts'][:8])}; {where}."


def document(found: HardwareConfig, path: Path, seconds: float) -> dict[str, Any]:
    return {"file": str(path), "seconds": round(seconds, 1), "hardware": to_dict(found)}


def show(found: HardwareConfig, path: Path, seconds: float) -> None:
    """The figures for people."""
    from rich import box
    from rich.table import Table

    figures = found.calibration
    console = wide_console()
    shapes = list(dict.fromkeys((p["m"], p["n"], p["k"]) for p in figures["products"]))
    precisions = list(dict.fromkeys(p["precision"] for p in figures["products"]))
    rates = {(p["precision"], p["m"], p["n"], p["k"]): 2 * p["m"] * p["n"] * p["k"] / p["seconds"] for p in figures["products"]}
    made = Table("matrix product", *precisions, box=box.SIMPLE_HEAD, pad_edge=False)
    for shape in shapes:
        cells = [f"{rates[(p, *shape)] / 1e12:.3g} TFLOP/s" if (p, *shape) in rates else "" for p in precisions]
        made.add_row(" x ".join(map(str, shape)), *cells)
    console.print(made)
    made = Table("collective", "ranks", "of a node", "payload", "time", "bytes/s", box=box.SIMPLE_HEAD, pad_edge=False)
    for one in figures["exchanges"]:
        rate = f"{one['bytes'] / one['seconds'] / 1e9:.3g} GB/s"
        size = f"{one['bytes'] / 1024:,.0f} KiB"
        made.add_row(one["operation"], str(one["size"]), str(one["near"]), size, f"{one['seconds'] * 1e6:,.0f} us", rate)
    console.print(made)
    block = figures["block"]
    console.print(
        f"a copy moves {2 * figures['copy']['bytes'] / figures['copy']['seconds'] / 1e9:.3g} GB/s; issuing the operations of a block takes "
        f"{block['block'] * 1e3:.3g} ms, of a micro-batch {block['micro_batch'] * 1e3:.3g} ms, of a step {block['step'] * 1e3:.3g} ms"
    )
    if found.cores and figures["per_node"] > found.cores:
        console.print(
            f"{figures['per_node']} ranks share {found.cores} cores: the times above are those of a rank with a core of its "
            f"own, and the cost model lets ranks take turns",
            soft_wrap=True,
        )
    console.print(f"written to {path} in {seconds:.0f} s; use it: trireme plan hardware={found.name} ...", soft_wrap=True)


class Progress:
    """Shows the current measurement: a bar on a terminal, a line for each part elsewhere."""

    def __init__(self) -> None:
        console = Console(stderr=True, highlight=False)
        self.bar = Bar(TextColumn("{task.description}", markup=False), BarColumn(bar_width=30), MofNCompleteColumn(), console=console)
        self.task = self.bar.add_task("starting", total=None)
        self.terminal = console.is_terminal
        self.said = ""
        if self.terminal:
            self.bar.start()

    def tell(self, state: JobState, line: dict[str, Any] | None) -> None:
        """Shows the state of the ranks; ``line`` is their newest progress."""
        words = str(line.get("what")) if line else f"{state.status.value} {state.detail}".strip()
        if self.terminal and line:
            self.bar.update(self.task, description=words, completed=line.get("step"), total=line.get("of"))
        elif self.terminal:
            self.bar.update(self.task, description=words)
        elif words != self.said:
            print(f"[{line['step']}/{line['of']}] {words}" if line else words, file=sys.stderr)
        self.said = words

    def close(self) -> None:
        if self.terminal:
            self.bar.stop()
