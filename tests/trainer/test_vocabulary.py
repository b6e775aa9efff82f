"""Rows that pad a vocabulary fill the tiles of matrix units, and nothing else: no loss, weight, checkpoint or text knows of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.farm import Farm
from tests.small_runs import ranks, small
from tests.whole_parameters import parameters
from trainer import loop
from trainer.build import Rank
from trainer.launch.rank_env import RankEnv
from trainer.shared.parallel import shards
from trainer.shared.parallel.shards import vocabulary_rows
from trainer.shared.records.artifacts import newest_checkpoint
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import TrainConfig

VOCAB = 250
"""Padded by 6 rows on one rank, and on each of two by 3 or 6: the second has 122 rows of its own."""


def test_rows_are_whole_tiles_where_that_adds_at_most_an_eighth() -> None:
    assert [vocabulary_rows(50257, t) for t in (1, 2, 8)] == [50304, 25216, 6400]
    assert [vocabulary_rows(v, 1) for v in (61, 113, 114, 128, 250)] == [61, 113, 128, 128, 256]
    for vocab in range(2, 2000, 7):
        for tensor in (1, 2, 3, 8):
            rows = vocabulary_rows(vocab, tensor)
            least = -(-vocab // tensor)
            assert least <= rows <= 1.125 * least and (rows % shards.WHOLE_TILES == 0 or 8 * (-least % shards.WHOLE_TILES) > least)


def trained(env: RankEnv, folder: Path, config: dict[str, Any], pads: bool) -> None:
    """A training; without padding if so asked, as by a version that did not know it."""
    if not pads:
        shards.WHOLE_TILES = 1
    loop.train(resolve(from_dict(TrainConfig, config), env.world_size), env, folder, 0)


def weighed(env: RankEnv, folder: Path, config: dict[str, Any], pads: bool) -> None:
    """The same from initial weights, which are written, as the last ones are."""
    weights: dict[str, Any] = {}
    make = Rank.draw_weights

    def drawn(self: Rank) -> None:
        make(self)
        weights["first"] = parameters(self)
        weights["rank"] = self

    Rank.draw_weights = drawn  # type: ignore[method-assign]
    trained(env, folder, config, pads)
    last = parameters(weights.pop("rank"))
    if env.rank == 0:
        torch.save(weights | {"last": last, "rows": vocabulary_rows(VOCAB, 1)}, folder / "weights.pt")


LAYOUTS = [
    {"data": 2, "sharding": {"params": 2, "grads": 2, "optimizer": 2}},
    {"tensor": 2, "sequence_parallel": True},
    pytest.param({"pipeline": 2}, marks=pytest.mark.campaign("layouts")),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_padding_changes_no_loss_and_no_weight(farm: Farm, layout: dict[str, Any]) -> None:
    config = small(model={"vocab": VOCAB, "layers": 2}, **layout)
    padded, plain = (farm.call(weighed, ranks(layout), config=config, pads=pads) for pads in (True, False))
    for name in ("losses", "grad_norms"):
        assert padded.result[name] == pytest.approx(plain.result[name], rel=1e-10)
    ours, theirs = (torch.load(run.directory / "weights.pt") for run in (padded, plain))
    assert ours["rows"] == 256 and theirs["rows"] == VOCAB
    for when in ("first", "last"):
        assert ours[when].keys() == theirs[when].keys()
        for name, weight in ours[when].items():
            assert weight.shape == theirs[when][name].shape
            torch.testing.assert_close(weight, theirs[when][name], rtol=1e-9, atol=0 if when == "first" else 1e-11)


def test_a_checkpoint_has_no_padding_and_one_without_is_read(farm: Farm, tmp_path: Path) -> None:
    """Written by a version that did not pad, on one rank; continued, padded, on two; and back."""
    wanted = farm.train(small(model={"vocab": VOCAB, "layers": 2}, steps=6), 1).checked().result["losses"]
    folder = str(tmp_path / "checkpoints")
    parts: list[tuple[int, dict[str, Any], bool]] = [(2, {}, False), (4, {"tensor": 2}, True), (6, {}, False)]
    for steps, layout, pads in parts:
        run = {"checkpoint": {"dir": folder, "every": 2}}
        config = small(model={"vocab": VOCAB, "layers": 2}, steps=steps, run=run, optimizer={"decay_steps": 6}, **layout)
        config["run"]["warmup_steps"] = 0
        continued = farm.call(trained, ranks(layout), config=config, pads=pads).result
        assert continued["losses"][-2:] == pytest.approx(wanted[steps - 2 : steps], rel=1e-10)
    newest = newest_checkpoint(Path(folder))
    assert newest is not None
    pieces = json.loads((newest / "manifest.json").read_text())["pieces"]
    assert {tuple(p["shape"]) for p in pieces if p["name"] == "embedding.tokens.weight"} == {(VOCAB, 32)}
