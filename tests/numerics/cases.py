"""A case: one point of the space of models, layouts and runs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.small_runs import ranks
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import (
    TrainConfig,
)

STEPS = 3
"""The first one's gradients, weights that were updated, and moments that were there before."""
TASKS = (2, 3)
EXAMPLES = [
    {"question": f"what is {i}?", "answer": "it is " * (i % 3) + str(i)} | {f"task{n}": i // 2 % n for n in TASKS} for i in range(12)
]
VOCAB = 300
"""Of text; made-up tokens have fewer."""


@dataclass(frozen=True)
class Case:
    """One point of the space. ``model``, ``layout``, ``tune``, ``run`` and ``data`` hold what differs from the defaults."""

    layout: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp64"
    batch: int = 8  # sequences of a step; 6 makes numbers of micro-batches that stages do not divide
    tune: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)  # its kind is synthetic by default; text is that of ``EXAMPLES``
    optimizer: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS
    phases: list[dict[str, Any]] = field(default_factory=list)
    shaken: int = 0  # each weight of the first step is a unit in the last place off, up or down as this seed draws; 0: none is

    def config(self, folder: Path = Path()) -> dict[str, Any]:
        """``folder`` has the text. Adam divides by the gradient's size. The gradient of a key's bias is zero but for rounding, so a large
        eps keeps that rounding from becoming a step."""
        text = {"source": str(folder / "examples.jsonl"), "path": str(folder / "corpus"), "template": "{question}\n{answer}"}
        return {
            "model": {"layers": 2, "hidden": 32, "heads": 4, "vocab": 61, "seq": 16} | self.model,
            "layout": {"micro_batch": 1} | self.layout,
            "data": text | {"kind": "synthetic"} | self.data,
            "optimizer": {"lr": 0.02, "warmup_steps": 1, "eps": 1e-4, "clip": 0.5} | self.optimizer,
            "run": {
                "steps": self.steps,
                "warmup_steps": 0,
                "precision": self.precision,
                "global_batch": self.batch,
                "bucket_mb": 0.03,
                "phases": self.phases,
            }
            | self.run,
            "tune": self.tune,
        }

    @property
    def alone(self) -> Case:
        """The same training by one process, as plain as it gets: all sequences of a step at once."""
        return replace(self, layout={"micro_batch": math.gcd(self.batch, *(phase["global_batch"] for phase in self.phases))}, run={})

    @property
    def ranks(self) -> int:
        return ranks(self.layout)

    @property
    def valid(self) -> bool:
        try:
            resolve(from_dict(TrainConfig, self.config()), self.ranks)
        except ConfigError:
            return False
        return True

    def __str__(self) -> str:
        return json.dumps(asdict(self))
