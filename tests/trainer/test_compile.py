"""torch.compile changes how a block is computed, not what; a block is one graph, whatever the layout."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.farm import Farm
from tests.small_runs import ranks, small
from trainer import loop
from trainer.launch.rank_env import RankEnv
from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import METHODS, TrainConfig

pytestmark = pytest.mark.slow


def each(env: RankEnv, folder: Path, configs: dict[str, dict[str, Any]]) -> None:
    """Trainings one after the other, which share what a process does before it compiles; each has its own folder."""
    for name, config in configs.items():
        loop.train(resolve(from_dict(TrainConfig, config), env.world_size), env, folder / name, 0)


COMPILED = [name for name, family in FAMILIES.items() if family.hub.block and not family.encoder_decoder]


@pytest.mark.parametrize(
    ("model", "layout", "methods"),
    [
        # a frozen embedding hands its block no gradient, whose backward must not seem idle
        pytest.param({"layers": 1}, {}, ["full", "lora"], marks=pytest.mark.campaign("compiler")),
        pytest.param({"layers": 1, "family": "bloom"}, {"recompute": "selective"}, ["full"], marks=pytest.mark.campaign("compiler")),
        *(
            pytest.param({"layers": 2, "family": family}, {}, [method], marks=pytest.mark.campaign("compiler"))
            for family, method in itertools.product(COMPILED, METHODS)
        ),
    ],
    ids=str,
)
def test_compiled_blocks_train_the_same_model(farm: Farm, model: dict[str, Any], layout: dict[str, Any], methods: list[str]) -> None:
    """In the code that the compiler writes for this processor."""
    ways = {"plain": False, "compiled": True}
    configs = {
        f"{way} {method}": small(precision="fp32", model=model, run={"compile": ways[way], "global_batch": 2}, **layout)
        | {"tune": {"method": method, "rank": 2, "virtual_tokens": 2, "encoder": 4}}
        for way, method in itertools.product(ways, methods)
    }
    folder = farm.call(each, 1, configs=configs).directory
    found = {name: json.loads((folder / name / "result.json").read_text()) for name in configs}
    for method in methods:
        plain, compiled = (found[f"{way} {method}"] for way in ways)
        assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-5), method
        assert compiled["grad_norms"] == pytest.approx(plain["grad_norms"], rel=1e-4), method


@pytest.mark.campaign("compiler")
def test_compiled_blocks_train_the_same_model_in_every_phase(farm: Farm) -> None:
    phases = [{"until": 16 * number, "global_batch": 16 // length, "seq": length} for number, length in enumerate((2, 4, 8), 1)]
    run = {"global_batch": 2, "phases": phases}
    configs = {str(way): small(steps=5, precision="fp32", model={"layers": 1}, run=run | {"compile": way}) for way in (False, True)}
    folder = farm.call(each, 1, configs=configs).directory
    plain, compiled = (json.loads((folder / name / "result.json").read_text()) for name in configs)
    assert len(plain["phases"]) == 4 and compiled["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def counted(env: RankEnv, folder: Path, config: dict[str, Any]) -> None:
    """A training in which the last rank's blocks are compiled, to graphs that are run as they were traced; the others' are not, and meet
    them in the same collectives. ``graphs.json`` has this project's operations of each graph that has some: the loss's have none."""
    from torch._dynamo.backends.common import aot_autograd  # seconds, for each process that collects tests
    from torch._dynamo.utils import counters

    graphs: dict[str, list[list[str]]] = {"forward": [], "backward": []}

    def note(way: str, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        own = [str(node.target).split(".")[1] for node in graph.graph.nodes if str(node.target).startswith("trireme")]
        graphs[way] += [own] if own else []
        return graph

    backend = aot_autograd(fw_compiler=functools.partial(note, "forward"), bw_compiler=functools.partial(note, "backward"))
    torch.compile = functools.partial(torch.compile, backend=backend)
    last = env.rank == env.world_size - 1
    config["run"]["compile"] = last
    loop.train(resolve(from_dict(TrainConfig, config), env.world_size), env, folder, 0)
    if last:
        (folder / "graphs.json").write_text(json.dumps(graphs | {"breaks": sum(counters["graph_break"].values())}))


LONGER = pytest.mark.campaign("compiler")
CASES = [
    pytest.param({"family": "llama"}, {"tensor": 2, "sequence_parallel": True}, marks=LONGER),  # as the key that heads share, here
    pytest.param({"vocab": 5}, {"tensor": 4}, marks=LONGER),  # the last rank's words are all padding
    pytest.param({"dropout": 0.1, "attention": "unfused"}, {"tensor": 2, "recompute": "selective"}, marks=LONGER),
    ({}, {"pipeline": 2, "schedule": "zero_bubble"}),
    ({"family": "llama", "dropout": 0.1}, {"data": 2, "sharding": {"params": 2, "grads": 2, "optimizer": 2}}),
]


def traced(farm: Farm, config: dict[str, Any], world_size: int) -> dict[str, Any]:
    """The graphs of a training with compiled blocks, once it is found to be the training without."""
    config["run"]["global_batch"] = 2
    plain = farm.train(config, world_size).checked().result
    run = farm.call(counted, world_size, config=config)
    assert run.result["losses"] == pytest.approx(plain["losses"], rel=1e-10)
    assert run.result["grad_norms"] == pytest.approx(plain["grad_norms"], rel=1e-10)
    assert run.result["communication"] == plain["communication"]
    graphs: dict[str, Any] = json.loads((run.directory / "graphs.json").read_text())
    assert graphs["breaks"] == 0
    return graphs


@pytest.mark.parametrize(("model", "layout"), CASES, ids=str)
def test_all_blocks_are_one_graph_with_one_operation_per_matrix(farm: Farm, model: dict[str, Any], layout: dict[str, Any]) -> None:
    """A matrix or a dropout that the compiler cannot look into would end a graph."""
    graphs = traced(farm, small(model=model, **layout), ranks(layout))
    assert len(graphs["forward"]) == len(graphs["backward"]) == 1
    assert graphs["forward"][0].count("multiply") == graphs["backward"][0].count("multiply_gradients") == 4
    blocks_of_queries = int("dropout" in model and "attention" not in model)
    assert graphs["forward"][0].count("attend") == graphs["backward"][0].count("attend_backward") == blocks_of_queries


def test_the_key_that_heads_share_is_in_the_graph_of_its_block(farm: Farm) -> None:
    model = {"family": "deepseek_v3", "ffn": 32, "latent": {"kv_rank": 6, "query_rank": 10, "rotary": 4, "value": 3}}
    graphs = traced(farm, small(model=model, tensor=2, sequence_parallel=True), 2)
    assert graphs["forward"][0].count("multiply") == graphs["backward"][0].count("multiply_gradients") == 7
    assert graphs["forward"][0].count("enter") == graphs["backward"][0].count("enter_gradient") == 1


def test_fused_products_are_in_the_graph_of_their_block(farm: Farm) -> None:
    """The compiler sees their shapes alone, so that they may wait for peers."""
    graphs = traced(farm, small(model={"family": "llama"}, run={"async_tensor": True}, tensor=2, sequence_parallel=True), 2)
    assert graphs["forward"][0].count("multiply") == 4


def test_low_rank_products_and_their_dropout_are_in_the_graph_of_their_block(farm: Farm) -> None:
    traced(farm, small(tensor=2) | {"tune": {"method": "lora", "rank": 2, "dropout": 0.2, "alpha": 8.0}}, 2)


def broken(env: RankEnv, folder: Path, config: dict[str, Any]) -> None:
    """A training with a compiler that gives up."""

    def backend(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such instruction")

    torch.compile = functools.partial(torch.compile, backend=backend)
    loop.train(resolve(from_dict(TrainConfig, config), env.world_size), env, folder, 0)


def test_an_error_of_the_compiler_ends_the_run_unless_a_fallback_is_asked_for(farm: Farm) -> None:
    out = farm.folder()
    ended = farm.wait(farm.start(farm.write_call(out, broken, config=small(model={"layers": 1}, run={"compile": True})), 1, out))
    assert set(ended.codes.values()) != {0} and "no such instruction" in ended.logs
    eager = farm.train(small(model={"layers": 1}), 1).checked().result
    fallen = farm.call(broken, 1, config=small(model={"layers": 1}, run={"compile": True, "compile_fallback": True})).result
    assert fallen["losses"] == eager["losses"]
