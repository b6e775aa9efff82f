"""The best learning rate of models of some widths, with and without a transfer: ``python -m benchmarks.transfer``.

Each width trains on this project's own source with every rate of a grid whose steps are factors of two, with AdamW, heads of one width, and
a rate that rises for a tenth of the steps and falls to zero; the loss is that of text that is held out, the mean over seeds. One process,
fp32, one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from trainer.comm.collectives import World
from trainer.data import open_dataset
from trainer.data.dataset import open_held_out
from trainer.data.prepare import prepare
from trainer.launch.failure import NonFinite
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import DataConfig, TrainConfig
from trainer.step import Engine
from trainer.validation import Validation

RATES = tuple(2.0**power for power in range(-10, -2))
HEAD = 16
VOCAB, SEQ, BATCH = 512, 64, 8
VALIDATED = 16
"""Batches of held-out text."""


def run_of(width: int, lr: float, seed: int, base: int | None, steps: int, data: DataConfig) -> dict[str, Any]:
    transfer = {"kind": "none"} if base is None else {"kind": "mup", "hidden": base}
    model = {"layers": 2, "hidden": width, "heads": width // HEAD, "vocab": VOCAB, "seq": SEQ, "tied": False, "transfer": transfer}
    return {
        "model": model,
        "layout": {"micro_batch": BATCH},
        "data": asdict(data),
        "optimizer": {"lr": lr, "min_lr": 0.0, "warmup_steps": steps // 10, "decay_style": "linear"},
        "run": {"steps": steps, "global_batch": BATCH, "precision": "fp32", "device": "cpu", "seed": seed, "warmup_steps": 0},
    }


def loss_of(run: dict[str, Any]) -> float:
    """Returns the loss on held-out text after the run; infinite if its numbers broke."""
    config = resolve(from_dict(TrainConfig, run), 1)
    engine = Engine(config, World(0, 1, torch.device("cpu"), "", 0, 10.0), open_dataset(config.data, config.model, config.run.seed))
    try:
        for step in range(config.run.steps):
            engine.step(step)
    except NonFinite:
        return math.inf
    return Validation(engine.rank, open_held_out(config.data, config.model)).first(VALIDATED).loss


def corpus(folder: Path) -> DataConfig:
    source = str(Path(__file__).parents[1] / "launcher")
    data = DataConfig(source=source, pattern="**/*.py", path=str(folder / "corpus"), vocab=VOCAB, held_out=0.05)
    prepare(data)
    return data


def table(title: str, found: dict[int, list[float]], rates: Sequence[float]) -> str:
    """Returns losses by width and rate, the best of each width in bold."""
    lines = [f"| {title} | " + " | ".join(f"{rate:.4g}" for rate in rates) + " |", "|---" * (len(rates) + 1) + "|"]
    for width, losses in found.items():
        best = min(losses)
        lines.append(f"| {width} | " + " | ".join(f"**{loss:.3f}**" if loss == best else f"{loss:.3f}" for loss in losses) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256], help="the first is the base (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=80, help="of a run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each rate (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all losses there")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    base, everything = asked.widths[0], dict[str, dict[int, list[float]]]()
    with tempfile.TemporaryDirectory() as folder:
        data = corpus(Path(folder))
        for title, of in (("with mup", base), ("without", None)):
            found = everything[title] = {}
            for width in asked.widths:
                runs = [[run_of(width, rate, seed, of, asked.steps, data) for seed in range(asked.seeds)] for rate in RATES]
                found[width] = [fmean(loss_of(run) for run in seeds) for seeds in runs]
                print(f"{title}, width {width}: {' '.join(f'{loss:.3f}' for loss in found[width])}", flush=True)
    for title, found in everything.items():
        print(f"\n{table(title, found, RATES)}")
    if asked.json:
        Path(asked.json).write_text(json.dumps({"rates": RATES, **everything}, indent=1) + "\n")


if __name__ == "__main__":
    main()
