"""Muon: the update of one process, of parts of matrices on several ranks, and the messages between them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from launcher.config.schema import ClusterConfig
from launcher.cost import predict
from launcher.cost.inputs import stages
from launcher.cost.inputs.layouts import to_table
from launcher.cost.prediction import CostModel
from launcher.cost.time import orthogonal
from tests.cost.machines import HARDWARE
from tests.farm import Farm
from tests.small_runs import small
from tests.whole_parameters import parameters
from trainer.comm.collectives import World
from trainer.data import open_dataset
from trainer.shared.records.resume import check_resume
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.optimizer import MuonConfig, OptimizerConfig
from trainer.shared.run.read import from_dict, to_dict
from trainer.shared.run.resolved import ResolvedTrainConfig
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import TrainConfig
from trainer.state.matrices import HeldPiece, rounds, share_out
from trainer.state.muon import orthogonalised
from trainer.step import Engine

STEPS = 3


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """The reference, one matrix at a time."""
    if len(x) > len(x.T):
        return newton_schulz(x.T, steps).T
    x = x / (x.norm() + 1e-8)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def muon(
    weight: Tensor, gradients: list[Tensor], lr: float, wd: float, nesterov: bool, cautious: bool, scale: str, steps: int, row_beta: float
) -> Tensor:
    """The reference of all updates of one matrix."""
    momentum, squares = torch.zeros_like(weight), torch.zeros(len(weight), 1, dtype=weight.dtype)
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient
        update = newton_schulz(0.05 * gradient + 0.95 * momentum if nesterov else momentum, steps)
        if row_beta:
            squares = row_beta * squares + (1 - row_beta) * (update**2).mean(1, keepdim=True)
            divided = update / (squares.sqrt() + 1e-8)
            update = divided * update.norm() / divided.norm()
        rows, columns = weight.shape
        update = update * (0.2 * math.sqrt(max(rows, columns)) if scale == "rms" else math.sqrt(max(1, rows / columns)))
        decayed = weight * (update.sign() == weight.sign()) if cautious else weight
        weight = weight - lr * (wd * decayed + update)
    return weight


MATRICES: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "blocks.0.attention.qkv.weight": lambda w: [head for group in w for head in group],
    "blocks.1.attention.output.weight": lambda w: [w],
    "blocks.0.mlp.up.weight": lambda w: [w[0], w[1]],
    "blocks.0.mlp.down.weight": lambda w: [w],
    "blocks.1.mlp.up.weight": lambda w: [half for expert in w for half in expert],
    "blocks.1.mlp.down.weight": lambda w: list(w),
    "blocks.1.mlp.router.weight": lambda w: [w],
}
"""The matrices of some parameters of a mixture of experts whose first block is dense."""


def run_of(optimizer: dict[str, Any], model: dict[str, Any] | None = None, **layout: Any) -> ResolvedTrainConfig:
    experts = {"count": 4, "ffn": 8, "dense_layers": 1}
    usual = {"family": "llama", "layers": 2, "kv_heads": 2, "tied": False, "experts": experts}
    optimizer = {"kind": "muon", "clip": 0.0, "warmup_steps": 0, "decay_steps": 1, "min_lr": 0.01, "lr": 0.01} | optimizer
    data = small(
        steps=STEPS, model=usual if model is None else model, run={"global_batch": 4}, optimizer=optimizer, **{"micro_batch": 2, **layout}
    )
    ranks = layout.get("tensor", 1) * layout.get("data", 1)
    return resolve(from_dict(TrainConfig, data), ranks)


def engine_of(config: ResolvedTrainConfig, world: World | None = None) -> Engine:
    world = world or World(0, 1, torch.device("cpu"), "", 0, 10.0)
    return Engine(config, world, open_dataset(config.data, config.model, config.run.seed))


@pytest.mark.parametrize(
    "settings",
    [{}, {"nesterov": False, "scale": "spectral"}, {"cautious": True, "steps": 3}, {"row_beta": 0.9}],
    ids=["usual", "plain momentum", "cautious", "rows"],
)
def test_each_matrix_has_the_update_of_the_reference(settings: dict[str, Any]) -> None:
    """Each head, each half of a gated matrix and each expert is a matrix. What is none has the update of AdamW."""
    engine = engine_of(run_of({"muon": settings, "weight_decay": 0.2}))
    pieces = {piece.record.name: piece for piece in engine.rank.shards}
    before = {name: value.clone() for name, value in parameters(engine.rank).items()}
    seen: dict[str, list[Tensor]] = {name: [] for name in MATRICES}
    for step in range(STEPS):
        engine.step(step)
        for name, gradients in seen.items():
            gradients.append(pieces[name].gradient.view(pieces[name].record.shape).clone())
    rule = {"nesterov": True, "cautious": False, "scale": "rms", "steps": 5, "row_beta": 0.0} | settings
    after = parameters(engine.rank)
    for name, cut in MATRICES.items():
        gradients = zip(*(cut(gradient) for gradient in seen[name]))
        for found, start, given in zip(cut(after[name]), cut(before[name]), gradients, strict=True):
            torch.testing.assert_close(found, muon(start, list(given), 0.01, 0.2, **rule), rtol=0, atol=1e-12)
        assert float((after[name] - before[name]).abs().max()) > 1e-3


def test_embeddings_head_and_vectors_have_the_updates_of_adamw() -> None:
    """In the first step those do not depend on what the matrices have."""
    ours, adam = (engine_of(run_of({"kind": kind})) for kind in ("muon", "adamw"))
    for engine in (ours, adam):
        engine.step(0)
    found, expected = parameters(ours.rank), parameters(adam.rank)
    groups = {piece.record.name: piece.record.group for piece in ours.rank.shards}
    same = {name for name in found if torch.equal(found[name], expected[name])}
    assert same == {name for name, group in groups.items() if group != "matrices"} and len(same) < len(found)


def test_singular_values_become_nearly_one() -> None:
    torch.manual_seed(3)
    for shape in ((1, 8, 8), (1, 8, 30), (2, 30, 8), (1, 1, 5), (3, 16, 40)):
        values = torch.linalg.svdvals(orthogonalised(torch.randn(shape, dtype=torch.float64), 5, 0.0))
        assert float(values.min()) > 0.6 and float(values.max()) < 1.21
    assert not orthogonalised(torch.zeros(1, 4, 6), 5, 1e-8).count_nonzero()


def test_a_skipped_step_changes_nothing() -> None:
    engine = engine_of(run_of({"muon": {"row_beta": 0.9}}))
    engine.step(0)
    before = [[state.clone() for state in piece.states.values()] for piece in engine.saved]
    for piece in engine.trained:
        piece.gradient.fill_(math.nan)
    engine.optimizer.step(0.1, torch.ones(1, dtype=torch.float64), torch.ones(()))
    after = [[*piece.states.values()] for piece in engine.saved]
    assert len(engine.saved) > len(engine.trained) and all(
        torch.equal(a, b) for one, other in zip(before, after) for a, b in zip(one, other)
    )


def held(rank: int, ranks: int) -> list[HeldPiece]:
    """Two matrices [6, 10] of one parameter, 120 elements in shards that cut them anywhere, and one [4, 4] on the last rank alone."""
    cuts = [round(120 * n / ranks) for n in range(ranks + 1)]
    shared = HeldPiece("a", (2, 6, 10), ((0, 2), (0, 6), (0, 10)), cuts[rank], cuts[rank + 1] - cuts[rank], True)
    return [shared, HeldPiece("b", (4, 4), ((0, 4), (0, 4)), 0, 16, True)] if rank == ranks - 1 else [shared]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_every_element_is_in_one_matrix_of_an_owner_that_has_a_part_of_it(ranks: int) -> None:
    owned = share_out([held(rank, ranks) for rank in range(ranks)])
    every = [matrix for mine in owned for matrix in mine]
    assert sorted(matrix.shape for matrix in every) == [(4, 4), (6, 10), (6, 10)]
    for owner, mine in enumerate(owned):
        for matrix in mine:
            assert matrix.owner == owner and owner in {fragment.rank for fragment in matrix.sources}
            elements = [n for fragment in matrix.sources for n in range(fragment.start, fragment.stop)]
            assert elements == list(range(math.prod(matrix.shape)))
    assert [sum(map(len, rounds(owned, most))) for most in (1, 60, 1000)] == [3, 3, 3]
    assert len(rounds(owned, 1)) >= len(rounds(owned, 1000)) == 1


PLAIN = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 128, "seq": 16, "tied": False}
CUT = 2 * 9 * 64 * 64
"""Elements of the matrices of two blocks that tensor ranks cut: output, up, down. Heads are whole on one."""


@pytest.mark.parametrize(
    ("layout", "elements"),
    [
        ({"tensor": 2}, CUT),
        ({"data": 2, "sharding": {"params": 1, "grads": 1, "optimizer": 2}}, CUT),
        ({"data": 2, "sharding": {"params": 2, "grads": 2, "optimizer": 2}}, CUT),
        ({"data": 2}, 0),
        ({}, 0),
    ],
    ids=str,
)
def test_what_ranks_send_is_what_the_formula_says(farm: Farm, layout: dict[str, Any], elements: int) -> None:
    """Of a matrix in two halves a rank sends its half, or gives the other one back. Each parameter has a bucket of its own here."""
    config = run_of({"muon": {"row_beta": 0.9}}, PLAIN, **layout)
    config.run.bucket_mb = 0.0
    found = farm.train(to_dict(config), layout.get("tensor", 1) * layout.get("data", 1)).checked().result
    sent = found["communication"].get("all_to_all over sharers data", {"payload_bytes": 0, "calls": 0})
    assert sent["payload_bytes"] == STEPS * 8 * elements / 2 and sent["calls"] == STEPS * 2 * (elements > 0)
    case = CostModel(ClusterConfig(gpus_per_node=2, hardware=HARDWARE["cpu"])).case(
        config.model, to_table([config.layout]), config.run, optimizer=config.optimizer
    )
    formula = orthogonal.sent(case, [one for one in orthogonal.matrices(case, stages.held(case)) if one.rows != config.model.head_width])
    assert formula == pytest.approx(8 * elements / 2 * 2 / 2 if elements else 0)
    predicted = predict(
        config.model, config.layout, config.run, ClusterConfig(gpus_per_node=2, hardware=HARDWARE["cpu"]), optimizer=config.optimizer
    )
    assert predicted.counted["optimizer"] == pytest.approx(found["memory"]["optimizer"], rel=0.02)
    rows = orthogonal.row_moments(case, orthogonal.matrices(case, stages.held(case)))
    own = 8 * 2 * (3 * 64 + 64 + 4 * 64 + 64) / (layout.get("tensor", 1) * layout.get("sharding", {}).get("optimizer", 1))
    assert float(np.max(rows)) == own


def test_matrices_have_one_moment_and_their_update_takes_time() -> None:
    place = ClusterConfig(gpus_per_node=8, hardware=HARDWARE["h100"])
    config = resolve(from_dict(TrainConfig, {"run": {"precision": "bf16", "global_batch": 8}, "model": {"hidden": 1024, "heads": 8}}), 8)
    asked = config.model, config.layout, config.run, place
    adam, muon = (predict(*asked, optimizer=OptimizerConfig(kind=kind)) for kind in ("adamw", "muon"))
    matrices = 12 * 1024 * 1024 * config.model.layers
    assert adam.counted["optimizer"] - muon.counted["optimizer"] == pytest.approx(4 * matrices)
    assert muon.time["optimizer"] > adam.time["optimizer"]
    rows = predict(*asked, optimizer=OptimizerConfig(kind="muon", muon=MuonConfig(row_beta=0.95)))
    assert rows.counted["optimizer"] - muon.counted["optimizer"] == pytest.approx(4 * config.model.layers * 9 * 1024)
    assert 0 < rows.time["optimizer"] - muon.time["optimizer"] < 0.1 * muon.time["optimizer"]
    more = predict(*asked, optimizer=OptimizerConfig(kind="muon", muon=MuonConfig(steps=10)))
    assert more.time["optimizer"] - adam.time["optimizer"] == pytest.approx(2 * (muon.time["optimizer"] - adam.time["optimizer"]))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"kind": "adamw", "muon": {"steps": 3}}, "optimizer.muon.steps=3 is for optimizer.kind=muon, not adamw; leave one of them out"),
        ({"muon": {"momentum": 1.0}}, "optimizer.muon.momentum=1 never learns from a gradient; use a value from 0 to below 1"),
        ({"muon": {"row_beta": 1.0}}, "optimizer.muon.row_beta=1 never learns from an update; use a value from 0 to below 1"),
        ({"kind": "lion"}, "optimizer.kind='lion' is not one of adamw or muon"),
    ],
)
def test_what_cannot_be_is_refused(optimizer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_of(optimizer)


def test_a_checkpoint_of_another_optimizer_is_refused_before_anything_is_started(farm: Farm) -> None:
    out = farm.folder()
    config = run_of({}, PLAIN)
    config.run.checkpoint.every, config.run.checkpoint.dir = STEPS, str(out)
    farm.train(to_dict(config), 1).checked()
    check_resume(config, None)
    other = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, kind="adamw"))
    with pytest.raises(ConfigError, match=r"has the moments of optimizer\.kind=muon, and it is adamw now; restore that, or give another"):
        check_resume(other, None)
    failed = farm.train(to_dict(other), 1)
    assert failed.codes == {0: 2} and "has the moments of optimizer.kind=muon" in failed.failure(0)["message"]
