"""run.async_tensor: products that communicate while they compute train what collectives and products train. On this machine a collective
and a product run, by which torch defines the operations; what GPUs run instead is held against that by ``tests/gpu``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.farm import Farm
from tests.numerics.cases import Case
from tests.numerics.matrix import Matrix
from tests.small_runs import ranks, small
from trainer import loop
from trainer.comm.collectives import World
from trainer.generate.session import for_inference
from trainer.launch.rank_env import RankEnv
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.foreign import CommandConfig
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import LayoutConfig, RunConfig, TrainConfig
from trainer.tensor.fused import FusedProducts, reserve

pytestmark = pytest.mark.slow

SHARDED = {"tensor": 2, "sequence_parallel": True}
CASES = [
    Case(SHARDED, {"family": "gpt"}),
    Case(SHARDED | {"recompute": "selective"}, {"family": "llama", "dropout": 0.1}),
    Case(SHARDED | {"recompute": "full", "micro_batch": 2}, {"family": "bloom"}),
    Case(SHARDED, {"seq": 2}),
    Case(SHARDED, {"family": "llama"}, tune={"method": "lora", "rank": 3, "alpha": 8.0, "dropout": 0.1, "targets": ["qkv", "down"]}),
    Case(SHARDED, {}, tune={"method": "prompt", "virtual_tokens": 4}),
    Case({"tensor": 4, "sequence_parallel": True, "recompute": "full"}, {"family": "llama"}),
    Case({"tensor": 4, "sequence_parallel": True, "recompute": "selective"}, {"seq": 4, "dropout": 0.1}),
    Case(SHARDED | {"pipeline": 2}, {"family": "gpt"}, batch=6),
    Case(SHARDED | {"pipeline": 2, "schedule": "zero_bubble"}, {"family": "llama"}),
    Case(SHARDED | {"pipeline": 2, "schedule": "zero_bubble", "recompute": "full"}, {"family": "gpt"}),
]
"""One row per rank, frozen matrices with and without a low-rank product, weight gradients now and later."""


@pytest.fixture(scope="module")
def matrix(farm: Farm) -> Matrix:
    return Matrix(farm)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.campaign("layouts"))])
def test_fused_products_train_what_one_process_and_what_collectives_train(matrix: Matrix, size: int) -> None:
    """Losses, norms and parameters, both held against one process."""
    plain = [dataclasses.replace(case, steps=2, batch=min(case.batch, 6)) for case in CASES if case.ranks == size]
    matrix.check([*plain, *(dataclasses.replace(case, run={"async_tensor": True}) for case in plain)])


def noted(env: RankEnv, folder: Path, config: dict[str, Any]) -> None:
    """A training; ``fused.json`` has what rank 0 asked of the fused operations."""
    asked = {"gathered": 0, "scattered": 0}

    def note(name: str) -> None:
        plain = getattr(FusedProducts, name)

        def counted(self: FusedProducts, *tensors: torch.Tensor) -> Any:
            asked[name] += 1
            return plain(self, *tensors)

        setattr(FusedProducts, name, counted)

    note("gathered")
    note("scattered")
    loop.train(resolve(from_dict(TrainConfig, config), env.world_size), env, folder, 0)
    if env.rank == 0:
        (folder / "fused.json").write_text(json.dumps(asked))


LAYERS, MICRO, STEPS = 2, 2, 2
ALL_LAYERS = [
    ({}, {}, 4, 2),
    ({"recompute": "full"}, {}, 6, 3),
    ({"pipeline": 2, "schedule": "zero_bubble"}, {}, 2, 2),
    ({}, {"method": "prompt", "virtual_tokens": 4}, 4, 4),
    ({}, {"method": "lora", "rank": 2, "targets": ["qkv", "output", "up", "down"]}, 4, 0),
]
"""By hand: layout, tuning, and how many gathers and reduce-scatters of a block and micro-batch are part of a product. Forward two each;
backward the gathers of two output gradients, and where no weight gradient follows the sums of two input gradients. Recomputation repeats
forward but for the sum that ends a block. On the first of two pipeline ranks half of the blocks are."""


@pytest.mark.parametrize(("layout", "tune", "gathers", "scatters"), ALL_LAYERS, ids=str)
def test_what_would_be_waited_for_is_part_of_a_product(
    farm: Farm, layout: dict[str, Any], tune: dict[str, Any], gathers: int, scatters: int
) -> None:
    """And the same bytes travel in as many calls as without."""
    config = small(STEPS, model={"layers": LAYERS}, run={"global_batch": MICRO}, **SHARDED, **layout) | {"tune": tune}
    plain = farm.train(config, ranks(SHARDED | layout)).checked().result
    run = farm.call(noted, ranks(SHARDED | layout), config=config | {"run": config["run"] | {"async_tensor": True}})
    each = LAYERS * MICRO * STEPS
    assert json.loads((run.directory / "fused.json").read_text()) == {"gathered": gathers * each, "scattered": scatters * each}
    assert run.result["communication"] == plain["communication"]


class Operations(TorchDispatchMode):
    """The names of all operations that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def multiplied(env: RankEnv, folder: Path) -> None:
    """Both products, and the operations that they consist of."""
    world = World(env.rank, env.world_size, torch.device("cpu"), env.address, env.port, 60.0)
    group = world.make_group("tensor", [0, 1])
    products, x = FusedProducts.on(torch.device("cpu"), group, world.group, 1024), torch.full((2, 1, 3), env.rank + 1.0)
    with Operations() as asked:
        whole, product = products.gathered(x, torch.ones(3, 5))
        piece = products.scattered(x, torch.ones(3, 5))
    assert whole[:, 0, 0].tolist() == [1, 1, 2, 2] and product[:, 0, 4].tolist() == [3, 3, 6, 6] and piece.tolist() == [[[9.0] * 5]]
    (folder / f"{env.rank}.json").write_text(json.dumps(sorted(asked.names)))
    world.close()


def test_without_shared_memory_they_use_no_functional_collective(farm: Farm) -> None:
    """Two threads of a gloo group write the long name of such a gather without a lock, into memory that one of them may have freed."""
    folder = farm.call(multiplied, 2).directory
    for rank in range(2):
        names = json.loads((folder / f"{rank}.json").read_text())
        assert any("mm" in name for name in names) and not [name for name in names if "functional" in name]


WRONG = [
    ({"layout": LayoutConfig()}, "is for layout.sequence_parallel=true on several tensor ranks, and the layout has layout.tensor=1"),
    (
        {"layout": LayoutConfig(tensor=2)},
        "layout.tensor=2, layout.sequence_parallel=false; change the layout or use run.async_tensor=false",
    ),
    ({"run": RunConfig(async_tensor=True, precision="fp8")}, "run.async_tensor=true has no products of run.precision=fp8; use run.prec"),
    ({"command": CommandConfig(trainer="theirs")}, "run.async_tensor=true is for our own trainer; leave it out for trainer=theirs"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_it_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    config = TrainConfig(layout=LayoutConfig(tensor=2, sequence_parallel=True), run=RunConfig(async_tensor=True))
    with pytest.raises(ConfigError, match=message):
        resolve(dataclasses.replace(config, **changes), 2)


def refused(env: RankEnv, folder: Path) -> None:
    """What a rank is told whose device shares no memory."""
    world = World(env.rank, env.world_size, torch.device("cpu"), env.address, env.port, 60.0)
    group = world.make_group("tensor", [0, 1])
    try:
        world.group.together(lambda: reserve(group, 1024), (ConfigError,))
    except ConfigError as error:
        (folder / f"{env.rank}.txt").write_text(str(error))
    world.close()


def test_devices_without_shared_memory_are_refused_by_every_rank_in_one_line(farm: Farm) -> None:
    folder = farm.call(refused, 2).directory
    for rank in range(2):
        said = (folder / f"{rank}.txt").read_text()
        assert said.startswith(
            "run.async_tensor=true needs tensor ranks on one host whose devices reach each other's memory (NVLink): rank"
        )
        assert said.endswith("; use run.async_tensor=false") and "\n" not in said


def test_generation_whose_rows_are_not_sharded_leaves_it_out() -> None:
    config = resolve(from_dict(TrainConfig, small(run={"async_tensor": True}, **SHARDED)), 2)
    assert not for_inference(config).run.async_tensor
