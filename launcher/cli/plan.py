"""``trireme plan``: every layout of a model on a cluster, predicted and sorted, with the reason for each that is out."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.console import titled, wide_console
from launcher.cli.overrides import NamedOption, add_overrides, check_task, layouts_asked
from launcher.labels import amount, interval, memory, percent, plural, shown
from launcher.named_files import check_own, write_named
from trainer.shared.run.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.config import Config
    from launcher.cost import Prediction
    from launcher.cost.inputs.case import Case
    from launcher.cost.known import KnownRun
    from launcher.planning.plan import Plan
    from trainer.shared.run.schema import LayoutConfig

PICTURE = "timeline.svg"
DRAWN = 160
"""Computations of a rank that a picture shows: more than that are stripes."""

DESCRIPTION = """\
Predicts step time and memory of every layout that obeys the rules: tensor x pipeline x virtual pipeline x micro-batch x schedule x
recomputation x sequence parallelism x state sharding. Nothing is run. Layouts that no other one with the same ranks beats in both
time and memory are listed, fastest first. Next to a step time stand the interval in which 80 % of such predictions lie
and the probability that this layout is the fastest. Those that fit into memory with a probability below 50 % are listed apart. Values of
layout keys keep to layouts that have them.

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
    """0 when a layout fits, 1 when none is likely to."""
    arguments = parser().parse_intermixed_args(argv)
    from launcher.config import compose
    from launcher.planning.layout_filter import widen_space
    from launcher.planning.plan import plan

    if arguments.top < 1:
        raise ConfigError(f"--top={arguments.top} must be 1 or more")
    if arguments.svg is not None and arguments.explain is None:
        raise ConfigError(f"--svg={arguments.svg} is where the timeline of one layout is drawn; say which, as in --explain 1")
    if arguments.measure is not None and (arguments.measure < 1 or arguments.explain is not None):
        raise ConfigError(f"--measure={arguments.measure} is how many layouts to measure, 1 or more, and stands without --explain")
    if arguments.explain is not None:
        check_own(PICTURE if arguments.svg is None else arguments.svg, "--svg", drew)

    started = time.perf_counter()
    wanted, others = layouts_asked(arguments.overrides)
    config = limited(compose(others, arguments.config_dir), arguments.limit)
    check_task(config, arguments.overrides)
    if config.task == "inference":
        from launcher.cli.plan_inference import plan as plan_inference

        if arguments.measure is not None:
            raise ConfigError("--measure is for trainings; 'trireme search task=inference' measures what may be on the front")

        return plan_inference(config, wanted, arguments)
    planned = plan(config, widen_space(wanted, config.search.space), wanted)
    seconds = time.perf_counter() - started
    if arguments.explain is not None:
        return explain(config, planned, arguments)
    if arguments.measure is not None:
        measure(config, planned, arguments)
    elif arguments.json:
        print(json.dumps(document(config, planned, arguments.top, seconds), indent=2, allow_nan=False))
    else:
        show(config, planned, arguments.top, seconds)
    return 0 if len(planned.order) else 1


def parser() -> argparse.ArgumentParser:
    """Overrides are Hydra's; the options are ours."""
    made = argparse.ArgumentParser("trireme plan", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_overrides(made)
    made.add_argument("--top", type=int, default=10, metavar="N", help="how many layouts are listed (default: %(default)s)")
    made.add_argument("--measure", type=int, metavar="N", help="the N layouts to measure so that the step times of all are known best")
    made.add_argument("--json", action="store_true", help="one JSON document on standard output")
    made.add_argument("--explain", metavar="LAYOUT", help="a place of the list or a layout's name: its parts and its timeline")
    made.add_argument("--svg", action=NamedOption, metavar="FILE", help="where the timeline is drawn (default: timeline.svg)")
    made.add_argument("--limit", type=float, metavar="GB", help="memory to plan for, per device, in 1e9 bytes (default: the hardware's)")
    return made


def limited(config: Config, limit_gb: float | None) -> Config:
    """``config`` with another memory budget."""
    if limit_gb is None:
        return config
    if not 0 < limit_gb < math.inf:
        raise ConfigError(f"--limit={limit_gb:g} must be a number of GB above 0")
    hardware = dataclasses.replace(config.cluster.hardware, memory_gb=limit_gb)
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, hardware=hardware))


def show(config: Config, planned: Plan, top: int, seconds: float) -> None:
    """The tables for people."""
    from launcher.cost.thresholds import FITS
    from launcher.planning.plan import AT_EDGE

    console = wide_console()
    console.print(heading(config))
    if len(planned.order):
        console.print(table(planned, planned.order[:top], config, console.width))
    else:
        size = config.cluster.hardware.memory_gb
        room = "memory" if size is None else f"the {size:g} GB of a device"
        console.print(f"no layout is likely to fit into {room}; more devices, a smaller model or more recomputation would help")
    best = planned.seconds[planned.order[0]] if len(planned.order) else float("inf")
    edge = [row for row in planned.fastest(AT_EDGE) if planned.seconds[row] < best][: max(3, top // 3)]
    if edge:
        console.print(f"Faster if they fit (probability below {percent(FITS, digits=0)}):")
        console.print(table(planned, edge, config, console.width))
    counts = (
        (f"{len(planned.space.table):,} layouts predicted, {len(planned.order):,} are in ({seconds:.2f} s). Out:", planned.out),
        ("Not predicted, since they break a rule, repeat another layout or were not asked for:", planned.space.dropped),
    )
    for title, reasons in counts:
        if reasons:
            console.print(title)
        for reason, count in reasons.items():
            console.print(f"  {count:>10,}  {reason}")


def measure(config: Config, planned: Plan, arguments: argparse.Namespace) -> None:
    """The layouts to measure first, as commands, and what they leave open."""
    from launcher.cli.console import Column, fitted_table
    from launcher.planning.layout_names import name_of, overrides_of
    from launcher.planning.plan import LISTED

    if not len(planned.order):
        raise ConfigError("--measure: no layout is likely to fit into memory, so there is none to measure; see the plan without it")
    rows, left = planned.most_telling(arguments.measure)
    if arguments.json:
        found = [entry(config, planned, row) | {"spread": spread} for row, spread in zip(rows, left[1:])]
        print(json.dumps({"spread": left[0], "measure": found}, indent=2, allow_nan=False))
        return
    console = wide_console()
    console.print(heading(config))
    columns = [
        Column("#", [str(place) for place in range(1, len(rows) + 1)]),
        Column("layout", [name_of(planned.layout(row)) for row in rows], least=18),
        Column("step", [f"{planned.seconds[row]:.4g} s" for row in rows], right=True),
        Column("all are known to", [f"±{percent(spread, digits=0)}" for spread in left[1:]], right=True),
    ]
    console.print(fitted_table(columns, console.width, [""] * len(rows)))
    console.print(
        f"What they take says most of the step times of the {min(len(planned.order), LISTED):,} fastest layouts, which are known to "
        f"±{percent(left[0], digits=0)} before (standard deviation). Train them in one sweep, some steps each, and learn from it:",
        soft_wrap=True,
    )
    given = [word for word in arguments.overrides if not word.startswith("layout.")]
    for row in rows:
        words = [*given, *overrides_of(planned.layout(row), config.layout), "sweep.name=measured"]
        console.print(f"  trireme train {shlex.join(words)}", soft_wrap=True, markup=False)
    console.print("  trireme calibrate measured --out cluster", soft_wrap=True)


def heading(config: Config) -> str:
    """One line: model, batch, cluster."""
    from launcher.cost import Shape
    from launcher.planning.plan import world

    size = amount(float(Shape.of(config.model).parameters)).replace(" G", " B")
    tokens = amount(config.run.global_batch * config.model.seq)
    batch = f"{config.run.global_batch} sequences ({tokens} tokens) a step"
    return f"{config.model.family} {size} parameters, {batch}, {config.run.precision}, {world(config.cluster)}"


def table(planned: Plan, rows: Any, config: Config, width: int) -> Any:
    """Layouts with what is predicted of them, in so many characters."""
    from launcher.cli.console import Column, fitted_table
    from launcher.planning.layout_names import name_of

    found = [planned.prediction(int(row)) for row in rows]
    tokens = config.run.global_batch * config.model.seq
    columns = [
        Column("#", [str(place) for place in range(1, len(found) + 1)]),
        Column("layout", [name_of(planned.layout(int(row))) for row in rows], least=18),
        Column("step", [f"{one.step_time_s:.4g} s" for one in found], right=True),
        Column("80 %", [interval(one.interval_s) for one in found], keep=1, right=True),
        Column("fastest", [percent(float(planned.chances[row])) for row in rows], keep=1, right=True),
        Column("tokens/s", [amount(tokens / one.step_time_s) for one in found], keep=4, right=True),
        Column("MFU", [percent(one.mfu) for one in found], keep=4, right=True),
        Column("memory", [memory(one.memory_bytes) for one in found], keep=2, right=True),
        Column("fits", [percent(one.fits, digits=0) for one in found], keep=2, right=True),
        Column("mostly", [mostly(one) for one in found], keep=5),
    ]
    return fitted_table(columns, width, [""] * len(found))


def mostly(predicted: Prediction) -> str:
    """The three largest losses: what the step spends on besides matrix products and attention."""
    useful = ("matrix products", "attention")
    shares = {name: seconds / predicted.step_time_s for name, seconds in predicted.time.items() if name not in useful}
    largest = sorted(shares.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {percent(share, digits=0)}" for name, share in largest if share >= 0.005)


def document(config: Config, planned: Plan, top: int, seconds: float) -> dict[str, Any]:
    """What ``--json`` prints."""
    from launcher.cost import Shape
    from launcher.planning.plan import AT_EDGE
    from trainer.shared.run.read import to_dict

    return {
        "model": to_dict(config.model),
        "parameters": int(Shape.of(config.model).parameters),
        "global_batch": config.run.global_batch,
        "cluster": {"nodes": config.cluster.nodes, "gpus_per_node": config.cluster.gpus_per_node, "hardware": config.cluster.hardware.name},
        "layouts": [entry(config, planned, int(row)) for row in planned.order[:top]],
        "edge": [entry(config, planned, int(row)) for row in planned.fastest(AT_EDGE)[:top]],
        "considered": len(planned.space.table),
        "in": len(planned.order),
        "out": planned.out,
        "not_predicted": planned.space.dropped,
        "seconds": seconds,
    }


def entry(config: Config, planned: Plan, row: int) -> dict[str, Any]:
    """One layout and its prediction, part by part."""
    from launcher.planning.layout_names import name_of, overrides_of
    from trainer.shared.run.read import to_dict

    predicted, layout = planned.prediction(row), planned.layout(row)
    return {
        "name": name_of(layout),
        "layout": to_dict(layout),
        "overrides": overrides_of(layout, config.layout),
        "step_time_s": predicted.step_time_s,
        "interval_s": predicted.interval_s,
        "fastest": float(planned.chances[row]),
        "mfu": predicted.mfu,
        "memory_bytes": predicted.memory_bytes,
        "fits": predicted.fits,
        "time": predicted.time,
        "memory": predicted.memory,
    }


def explain(config: Config, planned: Plan, arguments: argparse.Namespace) -> int:
    """One layout: every second and byte by part, and the simulated pipeline as a picture."""
    from launcher.cost.known import asked_cells, distances_from, nearest_runs, unmeasured
    from launcher.cost.time.matmul import per_line
    from launcher.cost.time.products import off_lines
    from launcher.planning.layout_names import name_of

    row = chosen(config, planned, arguments.explain)
    layout, predicted = planned.layout(row), planned.prediction(row)
    case = dataclasses.replace(planned.case, table=planned.space.table[row : row + 1])
    picture = Path(PICTURE if arguments.svg is None else arguments.svg)
    draw(case, layout, f"{heading(config)}: {name_of(layout)}", picture)
    known, learnt = nearest_runs(planned.case, row), config.cluster.hardware.learnt
    own = float(distances_from(learnt["places"], [asked_cells(planned.case, row)])[0]) if learnt.get("places") else None
    if arguments.json:
        more: dict[str, Any] = {"timeline": str(picture), "known": [{"distance": one.distance, **one.cells} for one in known]}
        more |= {"unmeasured": unmeasured(predicted.time), "learnt_distance": own, "off_lines": off_lines(case)}
        print(json.dumps(entry(config, planned, row) | more, indent=2, allow_nan=False))
        return 0
    console = wide_console()
    console.print(heading(config))
    console.print(titled(name_of(layout), predicted.why))
    console.print(
        f"80 % of such steps take {interval(predicted.interval_s)}; it is the fastest of all with a probability of "
        f"{percent(float(planned.chances[row]))}",
        soft_wrap=True,
    )
    console.print(parts("time of a step", predicted.time, lambda seconds: f"{seconds:.4g} s"))
    console.print(parts("memory of the fullest rank", predicted.memory, lambda size: f"{size / 1e9:.2f} GB"))
    if broken := off_lines(case):
        console.print(
            f"on a rank, {per_line(case.precision)} does not divide {', '.join(f'{size:,}' for size in broken)}: weight products with "
            f"{'this size' if len(broken) == 1 else 'these sizes'} take {1 / case.constants.unaligned:.2f} times as long as others",
            soft_wrap=True,
        )
    console.print(closest(known))
    if own is not None:
        runs = plural(len(learnt.get("runs", [])), "run")
        console.print(
            f"{config.cluster.hardware.name} has learnt from {runs} here, the nearest of them {own:.1f} doublings away", soft_wrap=True
        )
    for name, share in unmeasured(predicted.time).items():
        console.print(
            f"{name} is {percent(share, digits=0)} of the step, more than in known runs: this rests on no measurement", soft_wrap=True
        )
    print(f"the simulated pipeline (its first micro-batches, if there are many) is drawn in {picture}", file=sys.stderr)
    return 0


def closest(known: Sequence[KnownRun]) -> Any:
    """The known runs nearest to a prediction, and how far it was off there."""
    from rich import box
    from rich.table import Table

    made = Table("closest known runs", "model", "layout", "precision", "doublings away", "measured", box=box.SIMPLE_HEAD, pad_edge=False)
    for run in known:
        cells = run.cells
        model = f"{cells['layers']} layers of {cells['hidden']}, seq {cells['seq']}"
        layout = f"t{cells['tensor']} p{cells['pipeline']} mb{cells['micro_batch']} recompute {cells['recompute']}"
        where = f"{cells['source']}: {cells['gpus']} x {cells['hardware']}"
        off = f"{percent(float(cells['missed']), signed=True)} of predicted"
        made.add_row(where, model, layout, cells["precision"], f"{run.distance:.1f}", off)
    return made


def draw(case: Case, layout: LayoutConfig, title: str, path: Path) -> None:
    """The simulated pipeline as a picture of its own, in the colours of the report."""
    from launcher import results
    from launcher.results.predicted_timeline import simulated
    from launcher.results.timeline import picture

    drawn = simulated(case, layout, DRAWN)
    assert drawn is not None, "a step has computations"
    style = Path(results.__file__).with_name("report.css").read_text()
    write_named(path, str(picture(drawn, shown(title))).replace(">", f"><style>{style}</style>", 1), "--svg")


def drew(text: str) -> bool:
    """Whether a file that begins like this is a picture of ``draw``."""
    return text.startswith("<svg ") and text.partition(">")[2].startswith("<style>:root")


def chosen(config: Config, planned: Plan, what: str) -> int:
    """The row that ``--explain`` means: a place in the list, or a layout by name."""
    from launcher.config.command import check_layout
    from launcher.config.rules import settle
    from launcher.planning.layout_names import layout_of

    if what.isdecimal():
        if not 1 <= int(what) <= len(planned.order):
            raise ConfigError(f"--explain={what} is not a place of the list; it has {len(planned.order)}")
        return int(planned.order[int(what) - 1])
    layout = layout_of(what)
    row = planned.find(layout)
    if row is None:
        check_layout(config.trainer, settle(dataclasses.replace(config, layout=layout)).layout)  # the broken rule says it best
        raise ConfigError(f"layout {what!r} {why_absent(config, layout)}")
    return row


def why_absent(config: Config, layout: LayoutConfig) -> str:
    """Why a layout that obeys the rules is not among those of a plan."""
    from launcher.cost.inputs.layouts import to_table
    from launcher.planning.space import REDUNDANT, RULES, redundancies
    from trainer.shared.run.rules import resolve_model, world_size_of

    used, world = world_size_of(layout), config.cluster.world_size
    if used != world:
        return f"uses {used} of {world} ranks, and a plan is of layouts that use all; change its degrees, or cluster.nodes"
    code = redundancies(to_table([layout]), resolve_model(config.model), config.cluster.gpus_per_node, config.search.space)[0]
    if code >= 0:
        return f"is left out ({(RULES + REDUNDANT)[code]}); --top=N lists more of those that are in"
    return "is outside of search.space, or of the values given to layout keys; widen them, as with search.space.sharding=all"


def parts(title: str, values: dict[str, float], form: Any) -> Any:
    """A table of parts with shares of the whole, largest first."""
    from rich import box
    from rich.table import Table

    whole = sum(values.values())
    made = Table(title, "", "share", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, value in sorted(values.items(), key=lambda item: -item[1]):
        if value > 1e-6 * whole:  # differences that should be 0 may leave some bits
            made.add_row(name, form(value), percent(value / whole))
    made.add_row("all", form(whole), "")
    return made
