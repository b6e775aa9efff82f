"""Draws layouts from the whole space and holds each against one process.

    python tests/numerics/matrix.py '{"layout": {"tensor": 2}, "model": {}, "precision": "fp64"}'

runs one case by hand. A case is drawn from (seed, index); cases that break a rule are drawn again. Half of the cases are of an
ordinary small model; the others have corners: stages without a block, a token or two in a sequence, one sequence in a batch, a
vocabulary that leaves tensor ranks without a row, and models with fewer elements than shards, so that ranks own nothing.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.small_runs import ranks
from trainer.launch.rank_env import RankEnv
from trainer.spec import ConfigError, ResolvedTrainConfig, TrainConfig, from_dict, resolve
from trainer.spec.schema import TARGETS
from trainer.spec.tuning import text_model
from trainer.testing import Farm, free_port

if TYPE_CHECKING:
    from trainer.comm.collectives import World
    from trainer.engine import Saved

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}
MOST_RANKS = 8
STEPS = 10
TUNED_STEPS = 2
"""The first one's gradients, and what became of them."""


@dataclass(frozen=True)
class Case:
    """One point of the space. ``model`` and ``layout`` hold what differs from the defaults."""

    layout: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp64"
    batch: int = 8  # sequences of a step; 6 makes numbers of micro-batches that stages do not divide
    tune: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS
    async_tensor: bool = False

    def config(self) -> dict[str, Any]:
        """Adam divides by the gradient's size. The gradient of a key's bias is zero but for rounding, so a large eps keeps that
        rounding from becoming a step."""
        return {
            "model": {"layers": 4, "hidden": 32, "heads": 4, "vocab": 61, "seq": 16} | self.model,
            "layout": {"micro_batch": 1} | self.layout,
            "data": {"kind": "synthetic"},
            "optimizer": {"lr": 0.02, "warmup_steps": 3, "eps": 1e-4, "clip": 0.5},
            "run": {
                "steps": self.steps,
                "warmup_steps": 0,
                "precision": self.precision,
                "global_batch": self.batch,
                "bucket_mb": 0.03,
                "async_tensor": self.async_tensor,
            },
            "tune": self.tune,
        }

    @property
    def alone(self) -> Case:
        """The same training by one process."""
        return replace(self, layout={}, async_tensor=False)

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


def draw(seed: int, index: int) -> Case:
    """Case number ``index``."""
    dice = random.Random(f"{seed}/{index}")
    while True:
        case = _draw_any(dice)
        if case.ranks <= MOST_RANKS and case.valid:
            return replace(case, async_tensor=case.layout["sequence_parallel"] and dice.random() < 0.5)


def draw_tuned(seed: int, index: int, ranks: int | None = None) -> Case:
    """Case number ``index`` of tuning: any layout, or one on ``ranks`` ranks, and any method that trains a part."""
    dice = random.Random(f"tuned/{seed}/{index}")
    while True:
        case = draw(seed, dice.randrange(10**9))
        case = replace(case, tune=_draw_tuning(dice), precision="fp64", steps=TUNED_STEPS)
        if case.valid and ranks in (None, case.ranks):
            return case


def _draw_tuning(dice: random.Random) -> dict[str, Any]:
    return {
        "method": dice.choice(["lora", "lora", "lora", "adapter", "prompt", "p_tuning", "ia3"]),
        "targets": dice.sample(TARGETS, dice.randint(1, len(TARGETS))),
        "rank": dice.choice([1, 3, 4]),
        "alpha": 8.0,
        "dropout": dice.choice([0.0, 0.1]),
        "virtual_tokens": dice.choice([1, 3, 9]),
        "encoder": 5,
        "tasks": 1,
    }


def _draw_any(dice: random.Random) -> Case:
    schedule = dice.choice(["gpipe", "1f1b", "interleaved", "zero_bubble"])
    tensor, data = dice.choice([1, 2, 2, 2, 2, 4]), dice.choice([1, 2, 2, 2, 4])
    chains = [(p, g, o) for o in (1, 2, 4) for g in (1, 2, 4) for p in (1, 2, 4) if data % o == 0 and o % g == 0 and g % p == 0]
    pipeline, virtual = dice.choice([1, 2, 2, 2, 4]), 2 if schedule == "interleaved" else 1
    layout = {
        "tensor": tensor,
        "pipeline": pipeline,
        "data": data,
        "schedule": schedule,
        "virtual_pipeline": virtual,
        "micro_batch": dice.choice([1, 1, 2, 4]),
        "sequence_parallel": tensor > 1 and dice.random() < 0.6,
        "recompute": dice.choice(["none", "selective", "full"]),
        "recompute_layers": dice.choice([None, 1]),
        "recompute_every": dice.choice([1, 2]),
        "balance": dice.choice(["equal", "cost"]),
        "order": dice.choice(["tensor-data-pipeline", "tensor-pipeline-data"]),
        "sharding": dict(zip(("params", "grads", "optimizer"), dice.choice(chains))),
    }
    model = {
        "family": dice.choice(["gpt", "llama", "bloom"]),
        "tied": dice.random() < 0.5,
        "dropout": dice.choice([0.0, 0.0, 0.1]),
        "attention": dice.choice(["fused", "unfused"]),
        "kv_heads": dice.choice([4, 4, 2]),
        "layers": max(2, pipeline * virtual) + dice.choice([0, 0, 1]),
        "activation": dice.choice(["gelu", "swiglu", "squared_relu"]),
    }
    case = Case(layout, model, dice.choice(["fp64", "fp64", "fp32"]), dice.choice([6, 8]))
    return _with_corners(dice, case) if dice.random() < 0.5 else case


def _with_corners(dice: random.Random, case: Case) -> Case:
    """``case`` with some of what is smallest. In fp64, for LayerNorm over few elements makes much of rounding."""
    layout, model, batch = dict(case.layout), dict(case.model), case.batch
    chunks = layout["pipeline"] * layout["virtual_pipeline"]
    if dice.random() < 0.5:
        cuts = sorted(dice.randint(0, model["layers"]) for _ in range(chunks - 1))
        layout["stage_layers"] = [high - low for low, high in itertools.pairwise([0, *cuts, model["layers"]])]
    if dice.random() < 0.5:
        model |= {"hidden": dice.choice([8, 16]), "ffn": dice.choice([4, 64])}
    if dice.random() < 0.5:
        layout["data"], layout["micro_batch"], batch = MOST_RANKS // (layout["tensor"] * layout["pipeline"]), 1, 8
        layout["sharding"] = dict.fromkeys(("params", "grads", "optimizer"), layout["data"]) | {"params": dice.choice([1, layout["data"]])}
    if dice.random() < 0.4:
        model["vocab"] = dice.choice([2, 3, 5])
    if dice.random() < 0.4:
        model["seq"] = dice.choice([1, 2])
    if dice.random() < 0.2:
        layout["data"], layout["micro_batch"], batch = 1, 1, 1
        layout["sharding"] = dict.fromkeys(("params", "grads", "optimizer"), 1)
    return replace(case, layout=layout, model=model, batch=batch, precision="fp64")


def trained(env: RankEnv, out: str | Path, configs: list[dict[str, Any]]) -> None:
    """Run in every rank: train each of ``configs``, and leave losses, norms and this rank's part of the final parameters in ``out``. Each has
    a world of its own: torch names groups by how many a rank has made, and layouts give ranks different numbers of them."""
    from trainer.comm.collectives import World

    port = env.port
    for number, config in enumerate(configs):
        print(json.dumps(config), flush=True)  # the last one in the log is the one that failed
        world = World(env.rank, env.world_size, torch.device("cpu"), env.address, port, 60.0)
        found, port = _trained(world, resolve(from_dict(TrainConfig, config), env.world_size))
        torch.save(found, Path(out) / f"{number}.{env.rank}.pt")
        world.close()


def _trained(world: World, run: ResolvedTrainConfig) -> tuple[tuple[torch.Tensor, torch.Tensor, list[Saved]], int]:
    """Losses and norms of all steps, and parts of parameters."""
    from trainer.data import open_dataset
    from trainer.engine import Engine, parts

    dataset = open_dataset(run.data, text_model(run.model, run.tune), run.run.seed)
    engine = Engine(run, world, dataset)
    frozen = [piece.weight.clone() for piece in engine.held if not piece.record.trainable]
    results = [engine.step(step) for step in range(run.run.steps)]
    still = [piece.weight for piece in engine.held if not piece.record.trainable]
    assert all(map(torch.equal, frozen, still)), "what is frozen has changed"
    losses = torch.tensor([r.loss for r in results], dtype=torch.float64)
    found = losses, torch.tensor([r.grad_norm for r in results], dtype=torch.float64), parts(engine)
    return found, engine.groups.world.gather_objects(free_port())[0]  # nobody leaves a world that another one still uses


def train_all(farm: Farm, ranks: int, configs: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Losses, norms and final parameters of each of ``configs``, which the same ranks train one after the other."""
    folder = farm.call(trained, ranks, configs=configs).directory
    return [_whole([torch.load(folder / f"{number}.{rank}.pt") for rank in range(ranks)]) for number in range(len(configs))]


class Matrix:
    """Runs cases, and remembers what one process makes of each model."""

    def __init__(self, farm: Farm):
        self.farm = farm
        self.references: dict[str, dict[str, torch.Tensor]] = {}

    def run(self, cases: Sequence[Case]) -> list[dict[str, torch.Tensor]]:
        """What becomes of each of ``cases``, which take as many ranks as each other."""
        return train_all(self.farm, cases[0].ranks, [case.config() for case in cases])

    def remember(self, cases: Sequence[Case]) -> None:
        """The references of all ``cases`` by one process."""
        wanted = [case.alone for case in cases]
        if missing := [one for one in wanted if str(one) not in self.references]:
            self.references |= zip(map(str, missing), self.run(missing))

    def reference(self, case: Case) -> dict[str, torch.Tensor]:
        self.remember([case])
        return self.references[str(case.alone)]

    def worst(self, case: Case) -> tuple[str, float]:
        """What differs most from one process, and by how much, relative to its largest element."""
        return self.worst_of([case])[0]

    def worst_of(self, cases: Sequence[Case]) -> list[tuple[str, float]]:
        """The same of each of ``cases``, which take as many ranks as each other."""
        self.remember(cases)
        return [_worst(found, self.reference(case)) for case, found in zip(cases, self.run(cases))]

    def fails(self, case: Case) -> bool:
        try:
            return self.worst(case)[1] > TOLERANCE[case.precision]
        except AssertionError:
            return True

    def shrunk(self, case: Case) -> Case:
        """A failing case as plain as it gets: every setting that is not needed for the failure is left out."""
        if case.async_tensor and self.fails(plainer := replace(case, async_tensor=False)):
            case = plainer
        for part in ("layout", "model"):
            for name in list(getattr(case, part)):
                plainer = copy.deepcopy(case)
                del getattr(plainer, part)[name]
                if plainer.valid and self.fails(plainer):
                    case = plainer
        return case


def _whole(ranks: list[tuple[torch.Tensor, torch.Tensor, list[Saved]]]) -> dict[str, torch.Tensor]:
    """What all ranks left of a case. The loss and the norm are the same on each."""
    from trainer.engine import joined

    losses, norms, _ = ranks[0]
    assert all(torch.equal(losses, other) and torch.equal(norms, again) for other, again, _ in ranks), "ranks differ in losses or norms"
    return {"losses": losses, "norms": norms} | joined(parts for _, _, parts in ranks)


def _worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[str, float]:
    assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
    return max(((name, _difference(found[name], value)) for name, value in expected.items()), key=lambda pair: pair[1])


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    if not torch.isfinite(found).all():
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-300))


def main() -> int:
    case = Case(**json.loads(sys.argv[1]))
    farm = Farm(Path(tempfile.mkdtemp()))
    name, difference = Matrix(farm).worst(case)
    farm.close()
    print(f"{name} differs by {difference:.1e}, allowed is {TOLERANCE[case.precision]:.0e}")
    return int(difference > TOLERANCE[case.precision])


if __name__ == "__main__":
    sys.exit(importlib.import_module("tests.numerics.matrix").main())  # ranks find functions by the name of their module
