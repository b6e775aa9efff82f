"""``trireme coordinates``: a coordinate check, of some widths of a model after a few steps. The trainer does the work, on this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.console import Column, fitted_table, wide_console
from launcher.cli.overrides import add_overrides
from launcher.cli.parser import VerbParser
from launcher.own_python import finding_ours, module
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import save
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import LayoutConfig

if TYPE_CHECKING:
    from launcher.config import Config
    from launcher.planning.coordinates import Growth

Measured = Mapping[str, Mapping[str, float]]
"""Sizes of each kind of layer (``trainer.coordinates``)."""

DESCRIPTION = """\
A coordinate check: trains the model at some widths for a few steps of one batch, on one process of this machine, and prints the power of
the width with which activations, and what the steps change of them, grow. Where hyper-parameters are to serve every width
(model.transfer), both are constant: all powers are about 0. Those of logits may lie between -1/2 and 0, by their initial weights.

A wider model has more heads of the same width, and inner widths in proportion. Its length, batch, rate and data are those of the keys;
data=synthetic needs no corpus.

examples:
  trireme coordinates model=llama_tiny data=synthetic model.transfer.kind=mup model.transfer.hidden=128 optimizer.lr=0.004
  trireme coordinates model=llama_tiny data=synthetic --widths 64,128,256,512 --steps 8
"""


def main(argv: list[str]) -> int:
    """0 when all activations are constant, 1 when some are not, 2 for wrong input."""
    arguments = parser().parse_intermixed_args(argv)
    from launcher.config import compose, locate_data
    from launcher.config.packages import need
    from launcher.planning.coordinates import growths

    config = locate_data(compose(arguments.overrides, arguments.config_dir))
    if config.trainer.foreign:
        raise ConfigError("trainer: activations are those of our own trainer; leave it out")
    if resolve_model(config.model).encoder_layers:
        raise ConfigError(f"model.family={config.model.family} has an encoder, and layers of one stack are compared; use another family")
    widths = widths_of(arguments.widths, config.model.hidden)
    if arguments.steps < 1:
        raise ConfigError(f"--steps={arguments.steps} trains nothing; use 1 or more")
    need("train", "training a few steps")
    measured = trained(config, widths, arguments.steps)
    if isinstance(measured, int):
        return measured
    found = growths(widths, measured)
    if arguments.json:
        print(json.dumps({"widths": widths, "layers": [dataclasses.asdict(each) | {"fault": each.fault} for each in found]}, indent=2))
    else:
        show(widths, found)
    return int(any(each.fault for each in found))


def parser() -> VerbParser:
    made = VerbParser("trireme coordinates", DESCRIPTION)
    add_overrides(made)
    made.add_argument("--widths", metavar="N,N,...", help="values of model.hidden (default: 1, 2 and 4 times that of the model)")
    made.add_argument("--steps", type=int, default=4, help="optimizer steps (default: %(default)s)")
    made.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return made


def widths_of(text: str | None, hidden: int) -> list[int]:
    """Returns the widths asked for. Raises ``ConfigError`` for fewer than two, or for words that are none."""
    if text is None:
        return [hidden, 2 * hidden, 4 * hidden]
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words) or len({*map(int, words)}) < 2:
        raise ConfigError(f"--widths={text} is not a list of different widths; give at least two, such as 64,128,256")
    return sorted({*map(int, words)})


def trained(config: Config, widths: Sequence[int], steps: int) -> list[Measured] | int:
    """Returns the sizes at each width, or the exit code of the training that failed."""
    from launcher.planning.coordinates import widened

    run = dataclasses.replace(config.run, steps=steps, warmup_steps=0, device="cpu", phases=[], eval_every=0)
    optimizer = dataclasses.replace(config.optimizer, decay_steps=config.optimizer.decay_steps or config.run.steps)
    layout = LayoutConfig(micro_batch=run.global_batch)
    plain = dataclasses.replace(config.train_config(), run=run, optimizer=optimizer, layout=layout)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{width}.yaml") for width in widths]
        for width, file in zip(widths, files):
            wide = dataclasses.replace(plain, model=widened(config.model, width))
            resolve(wide, 1)  # wrong input is refused before anything is trained
            save(wide, file)
        command = module("trainer.coordinates", *map(str, files))
        done = subprocess.run(command, env=os.environ | finding_ours(), stdout=subprocess.PIPE, text=True)
    return done.returncode or list(json.loads(done.stdout))


def show(widths: Sequence[int], found: Sequence[Growth]) -> None:
    """Prints a table for people, and the verdict."""
    console = wide_console()
    figures = {
        "power of width": [f"{each.size:+.2f}" for each in found],
        "of the change": [f"{each.change:+.2f}" for each in found],
        **{f"size at {width}": [f"{each.sizes[n]:.3g}" for each in found] for n, width in enumerate(widths)},
    }
    columns = [Column("layer", [each.kind for each in found], least=len("queries, keys, values"))]
    columns += [Column(head, cells, right=True, keep=int(head.startswith("size"))) for head, cells in figures.items()]
    columns.append(Column("", [each.fault for each in found]))
    console.print(fitted_table(columns, console.width, [""] * len(found)))
    wrong = [f"{each.kind} ({each.fault})" for each in found if each.fault]
    print(f"not constant: {'; '.join(wrong)}" if wrong else "constant: what every layer computes, and what the steps change of it")
