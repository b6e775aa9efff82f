"""Attention in the parts that context ranks pass around: what is merged is attention to whole sequences, whatever hides keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.models.attention import AttentionCore
from trainer.shared.parallel.sequence import zigzag
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import ModelConfig
from trainer.tensor.block_attention import BlockAttention
from trainer.tensor.dropout import Noise, ShardedAttentionDropout
from trainer.tensor.region import places
from trainer.tensor.ring import KERNELS, FusedParts, Masks, Parts, ScoredParts, Turn, heads_first, merge, squares
from trainer.tensor.traced import NO_STAMP

BATCH, HEADS, WIDTH, NARROW = 2, 4, 6, 5
CORES: dict[str, dict[str, Any]] = {
    "all keys": {},
    "one key and value": {"kv_heads": 1},
    "linear biases": {"positions": "alibi"},
    "scores of thousands": {"attention_scale": 2000.0},
    "windows": {"window": 3},
    "a window of oneself": {"window": 1, "kv_heads": 2},
    "caps": {"score_cap": 0.5, "window": 7},
    "dropout": {"dropout": 0.3},
    "texts": {"positions": "alibi"},
}
FUSED = ("all keys", "one key and value", "linear biases", "scores of thousands")
"""Those that flash kernels can do."""


def core_of(model: ResolvedModelConfig) -> AttentionCore:
    """The core of a block, with dropout that is a function of positions."""
    core = AttentionCore(model)
    if model.dropout:
        core.dropout = ShardedAttentionDropout(model.dropout, "here", Noise(7), core.heads, model.heads)
    if model.dropout or core.cap is not None:
        core.in_blocks = BlockAttention(core.dropout if model.dropout else None, core.window, core.cap)  # type: ignore[arg-type]
    return core


def texts(length: int) -> Tensor:
    """Keys that queries of texts see, [b, 1, s, s]: texts of one token, and one that ends where a piece does."""
    starts = torch.stack([torch.tensor([max(n for n in (0, 1, length // 2, cut) if n <= i) for i in range(length)]) for cut in (5, 9)])
    columns = torch.arange(length)
    return ((columns <= columns[:, None]) & (columns >= starts[..., None]))[:, None]


def in_turns(parts: Parts, ranks: int, tensors: list[Tensor], dy: Tensor, masks: Masks) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients, [b, heads, s, d], of all ranks, each of which has its positions of ``tensors`` and ``dy``."""
    length = dy.shape[-2]
    runs = [zigzag(length, ranks, rank) for rank in range(ranks)]
    rows = [places(own, dy.device) for own in runs]
    whole, gradients = torch.zeros_like(dy), [torch.zeros_like(x) for x in tensors]
    for rank in range(ranks):
        query, flow, output = (x[..., rows[rank], :] for x in (tensors[0], dy, torch.zeros_like(dy)))
        logs = torch.full(output.shape[:-1], -torch.inf, dtype=dy.dtype)
        turns = [(Turn(runs[rank], runs[(rank - step) % ranks], length), rows[(rank - step) % ranks]) for step in range(ranks)]
        for turn, there in turns:
            keys, values = (x[..., there, :] for x in tensors[1:])
            for own, found, log in parts.attend(turn, query, keys, values, masks):
                merge(output[..., own, :], logs[..., own], found, log)
        for turn, there in turns:
            keys, values = (x[..., there, :] for x in tensors[1:])
            for own, seen, *found in parts.differentiate(turn, query, keys, values, masks, flow, output, logs):
                for total, at, part in zip(gradients, (rows[rank][own], there[seen], there[seen]), found):
                    total.index_add_(2, at, part)
        whole[..., rows[rank], :] = output
    return whole, gradients


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CORES)
def test_what_is_merged_is_attention_to_whole_sequences(name: str, ranks: int) -> None:
    torch.manual_seed(ranks)
    model = resolve_model(ModelConfig(hidden=HEADS * WIDTH, heads=HEADS, **{"positions": "none", "kv_heads": HEADS} | CORES[name]))
    core, length = core_of(model), 4 * ranks
    sizes = ((HEADS, WIDTH), (model.kv_heads, WIDTH), (model.kv_heads, NARROW))
    tensors = [torch.randn(length, BATCH, *size, dtype=torch.float64).requires_grad_() for size in sizes]
    if name == "texts":
        core.visible = lambda: texts(length)
    masks = Masks(core.visible and core.visible(), core.dropout.noise.stamp if model.dropout else NO_STAMP)  # type: ignore[union-attr]
    expected = core(*tensors)
    dy = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, tensors, dy)
    given, flow = [heads_first(x.detach()) for x in tensors], heads_first(dy.unflatten(2, (HEADS, -1)))
    kinds = (FusedParts, ScoredParts) if FusedParts.can(core, tensors[0], length) else (ScoredParts,)
    assert len(kinds) == 1 + (name in FUSED)
    for kind in kinds:
        output, found = in_turns(kind(core), ranks, given, flow, masks)
        torch.testing.assert_close(output, heads_first(expected.detach().unflatten(2, (HEADS, -1))), rtol=1e-11, atol=1e-11)
        for one, other in zip(found, wanted):
            torch.testing.assert_close(one, heads_first(other), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_every_turn_but_the_first_is_half_of_all_pairs_and_all_turns_see_each_pair_once(ranks: int) -> None:
    length = 6 * ranks
    for rank in range(ranks):
        own = zigzag(length, ranks, rank)
        seen = {query: set[int]() for run in own for query in run}
        for step in range(ranks):
            turn = Turn(own, zigzag(length, ranks, (rank - step) % ranks), length)
            queries, keys = ([place for run in runs for place in run] for runs in (turn.own, turn.other))
            worked = 0
            for rows, there, causal in squares(turn):
                assert causal == (step == 0)
                for query in queries[rows]:
                    found = {key for key in keys[there] if key <= query or not causal}
                    assert not seen[query] & found
                    seen[query] |= found
                    worked += len(found)
            assert step == 0 or worked == len(queries) * len(keys) // 2
        assert all(found == set(range(query + 1)) for query, found in seen.items())


def test_a_window_leaves_out_the_parts_that_no_query_sees() -> None:
    model = resolve_model(ModelConfig(hidden=HEADS * WIDTH, heads=HEADS, positions="none", window=2))
    parts, length = ScoredParts(core_of(model)), 32
    x = torch.randn(1, HEADS, length // 4, WIDTH)
    own, pairs = zigzag(length, 4, 0), []
    for other in range(4):
        turn = Turn(own, zigzag(length, 4, other), length)
        pairs += [(other, rows, found.isfinite().all()) for rows, _, found in parts.attend(turn, x, x, x, Masks(None, NO_STAMP))]
    assert [(other, rows) for other, rows, _ in pairs] == [(0, slice(0, 4)), (0, slice(4, 8)), (1, slice(4, 8))]


def test_flash_attention_on_gpus_takes_what_it_is_given() -> None:
    """By torch's own account of its shapes, without a GPU."""
    query = torch.empty(16, 2, 8, 64, dtype=torch.bfloat16, device="meta").permute(1, 2, 0, 3)
    key = torch.empty(2, 2, 12, 64, dtype=torch.bfloat16, device="meta")
    output, logs = KERNELS["cuda"].forward(query, key, key, False, 0.1)
    assert output.shape == query.shape and logs.shape == query.shape[:-1] and logs.dtype == torch.float32
    found = KERNELS["cuda"].backward(torch.empty_like(output), query, key, key, output, logs, False, 0.1)
    assert [x.shape for x in found] == [query.shape, key.shape, key.shape]
