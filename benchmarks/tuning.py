"""What of a step of full tuning each method takes, in one process: ``python -m benchmarks.tuning``.

The model is one whose matrices dominate: 4 layers, hidden 512, vocabulary 1024, 1024 tokens a step, fp32, one thread. Frozen matrices have
no weight gradient: 4 of 6 products remain, and what is added. Steps of all methods alternate, and the least processor time of each counts:
the others say how busy the machine is.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from trainer.comm.collectives import World
from trainer.data import open_dataset
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import METHODS, TrainConfig
from trainer.shared.run.tuning import text_model
from trainer.step import Engine

RUN: dict[str, Any] = {
    "model": {"layers": 4, "hidden": 512, "heads": 8, "vocab": 1024, "seq": 256},
    "layout": {"micro_batch": 4},
    "data": {"kind": "synthetic"},
    "run": {"steps": 100, "global_batch": 4, "precision": "fp32", "device": "cpu"},
}


def engine_of(method: str) -> Engine:
    config = resolve(from_dict(TrainConfig, RUN | {"tune": {"method": method, "rank": 8}}), 1)
    dataset = open_dataset(config.data, text_model(config.model, config.tune), config.run.seed)
    return Engine(config, World(0, 1, torch.device("cpu"), "", 0, 10.0), dataset)


def seconds(engine: Engine, step: int) -> float:
    """Processor time of a step."""
    start = time.process_time()
    engine.step(step)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=8, help="of each method; the first is left out (default: %(default)s)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    engines = {method: engine_of(method) for method in dict.fromkeys(["full", *asked.methods])}
    rounds = [{method: seconds(engine, step) for method, engine in engines.items()} for step in range(asked.steps)]
    least = {method: min(taken[method] for taken in rounds[1:]) for method in engines}
    for method, taken in least.items():
        print(f"{method:9} {taken:6.2f} s   {taken / least['full']:.2f}")


if __name__ == "__main__":
    main()
