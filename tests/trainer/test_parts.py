"""The pure parts of the trainer: rates, scales, noise, initial weights, FLOPs."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from tests.trainer.test_attention import Sizes
from trainer import health
from trainer.models.layers import Init
from trainer.pipeline.recompute import chosen_blocks
from trainer.shared.records.summary import spread
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.flops import core_flops, model_flops, recomputed_flops
from trainer.shared.run.optimizer import OptimizerConfig
from trainer.shared.run.schema import LayoutConfig, ModelConfig
from trainer.state.loss_scale import FIRST, GROWTH_STEPS, LossScale
from trainer.state.optimizer import learning_rate
from trainer.state.parameters import BLOCK, ParameterRecord, initial_part, initial_value
from trainer.tensor.dropout import DropoutKey, Noise

OPTIMIZER = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=4, decay_steps=14)


def test_the_rate_rises_to_its_peak_and_falls_along_a_cosine() -> None:
    rates = [learning_rate(OPTIMIZER, step) for step in range(20)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[9] == pytest.approx(0.55)
    assert rates[14:] == [pytest.approx(0.1)] * 6
    assert all(a > b for a, b in itertools.pairwise(rates[4:15]))


def test_a_loss_scale_halves_on_overflow_and_doubles_after_a_good_while() -> None:
    scale = LossScale.of("fp16")
    assert scale.overflowed() and scale.value == FIRST / 2
    for _ in range(GROWTH_STEPS - 1):
        scale.succeeded()
    assert scale.overflowed() and scale.value == FIRST / 4, "an overflow starts the count again"
    for _ in range(GROWTH_STEPS):
        scale.succeeded()
    assert scale.value == FIRST / 2


def test_a_scale_that_cannot_be_lowered_is_not_the_cause() -> None:
    scale = LossScale.of("fp16")
    while scale.overflowed():
        pass
    assert scale.value == 1.0
    assert not LossScale.of("bf16").overflowed() and LossScale.of("bf16").value == 1.0


def whole_mask(noise: Noise, rows: range, columns: range, p: float = 0.3, site: str = "a") -> torch.Tensor:
    return noise.kept(site, p, ((torch.arange(rows.start, rows.stop), 1), (torch.arange(columns.start, columns.stop), 500)))


def test_noise_of_a_part_is_the_part_of_the_noise() -> None:
    noise = Noise(1)
    whole = whole_mask(noise, range(40), range(500))
    assert torch.equal(whole_mask(noise, range(10, 20), range(100, 250)), whole[10:20, 100:250])


def test_noise_keeps_the_right_share_and_differs_by_seed_step_and_site() -> None:
    masks = [
        whole_mask(Noise(1), range(40), range(500)),
        whole_mask(Noise(2), range(40), range(500)),
        whole_mask(Noise(1), range(40), range(500), site="b"),
    ]
    noise = Noise(1)
    with noise.at(DropoutKey(step=1)):
        masks.append(whole_mask(noise, range(40), range(500)))
    assert torch.equal(masks[0], whole_mask(noise, range(40), range(500))), "the place is left as it was"
    for mask in masks:
        assert float(mask.float().mean()) == pytest.approx(0.7, abs=5 * math.sqrt(0.21 / mask.numel()))
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert float((mask == other).float().mean()) == pytest.approx(0.58, abs=0.03)


def test_noise_of_neighbours_is_independent() -> None:
    mask = whole_mask(Noise(3), range(200), range(500), p=0.5).float()
    for shifted in (mask[:, 1:] * mask[:, :-1], mask[1:] * mask[:-1]):
        assert float(shifted.mean()) == pytest.approx(0.25, abs=0.01)


RECORD = ParameterRecord("w", (6, BLOCK // 2), ((0, 6), (0, BLOCK // 2)), (6, BLOCK // 2), Init(std=0.5), "matrices")


def test_initial_weights_of_a_slice_are_the_slice_of_initial_weights() -> None:
    whole = initial_value(RECORD, 7)
    for box in (((1, 5), (0, BLOCK // 2)), ((0, 6), (11, 333)), ((5, 6), (BLOCK // 2 - 9, BLOCK // 2))):
        shape = tuple(stop - start for start, stop in box)
        part = initial_value(dataclasses.replace(RECORD, region=box, local_shape=shape), 7)
        assert torch.equal(part, whole[tuple(slice(*span) for span in box)])
    assert float(whole.std()) == pytest.approx(0.5, rel=0.01)


def test_initial_weights_depend_on_seed_and_name_and_padding_is_zero() -> None:
    small = dataclasses.replace(RECORD, shape=(5, 8), region=((3, 5), (0, 8)), local_shape=(3, 8))
    value = initial_value(small, 7)
    assert (value[2] == 0).all() and (value[:2] != 0).all()
    assert not torch.equal(value, initial_value(small, 8))
    assert not torch.equal(value, initial_value(dataclasses.replace(small, name="v"), 7))
    nothing = dataclasses.replace(small, region=((5, 5), (0, 8)))
    assert (initial_value(nothing, 7) == 0).all()


def test_model_flops_are_those_of_narayanan_et_al() -> None:
    """72 B L s h^2 (1 + s/(6h) + V/(12 L h)), equation 3 without its recomputation."""
    L, h, s, V, B = 4, 64, 32, 1000, 3
    model = resolve_model(ModelConfig(layers=L, hidden=h, heads=4, seq=s, vocab=V))
    assert model_flops(model, B) == pytest.approx(72 * B * L * s * h**2 * (1 + s / (6 * h) + V / (12 * L * h)))
    full = recomputed_flops(model, LayoutConfig(recompute="full"), L, B)
    ending = 8 * B * L * s * h**2  # the product that ends a block is not computed again
    assert model_flops(model, B) + full + ending == pytest.approx(96 * B * L * s * h**2 * (1 + s / (6 * h) + V / (16 * L * h)))
    selective = recomputed_flops(model, LayoutConfig(recompute="selective"), L, B)
    assert model_flops(model, B) + selective == pytest.approx(72 * B * L * s * h**2 * (1 + 2 * s / (9 * h) + V / (12 * L * h)))


def test_a_decoders_queries_see_what_it_wrote_and_all_that_the_encoder_read() -> None:
    """Attention of 8 positions that are written, on 32 that are read: both products, 2 operations each."""
    model = resolve_model(ModelConfig(family="t5", layers=4, hidden=64, heads=4, seq=32, decoder_seq=8, vocab=100))
    assert [core_flops(model, block) for block in (0, 3)] == [4 * 32 * 32 * 64, 4 * 8 * (8 + 32) * 64]


def test_flops_of_swiglu_and_grouped_queries_count_their_matrices() -> None:
    model = resolve_model(ModelConfig(family="llama", layers=2, hidden=64, heads=8, kv_heads=2, seq=16, vocab=100, ffn=192))
    weights = 2 * (64 * 64 + 2 * 64 * 16 + 64 * 64 + 3 * 64 * 192) + 100 * 64
    assert model_flops(model, 1) == pytest.approx(6 * 16 * weights + 3 * 2 * 4 * 16**2 * 64)


@pytest.mark.parametrize(
    "layout, expected",
    [
        (LayoutConfig(), []),
        (LayoutConfig(recompute="selective"), [0, 1, 2, 3, 4]),
        (LayoutConfig(recompute="full"), [0, 1, 2, 3, 4]),
        (LayoutConfig(recompute="full", recompute_layers=3), [0, 1, 2]),
        (LayoutConfig(recompute="full", recompute_every=2), [0, 2, 4]),
        (LayoutConfig(recompute="full", recompute_layers=3, recompute_every=2), [0, 2]),
        (LayoutConfig(recompute="full", recompute_layers=0), []),
    ],
)
def test_blocks_that_are_recomputed(layout: LayoutConfig, expected: list[int]) -> None:
    assert [i for i, chosen in enumerate(chosen_blocks(layout, 5)) if chosen] == expected


def test_spread_is_median_and_interquartile_range() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 100.0]) == (3.0, 2.0)
    assert spread([5.0]) == (5.0, 0.0)


@pytest.mark.parametrize(("shape", "region", "local"), [
    ((7, 5), ((2, 6), (0, 5)), (5, 5)),
    ((7, 5), ((0, 7), (1, 4)), (7, 3)),
    ((4, 3, 2), ((0, 4), (2, 3), (0, 2)), (4, 2, 2)),
    ((9,), ((3, 8),), (6,)),
    ((9, 2), ((9, 9), (0, 2)), (3, 2)),
])  # fmt: skip
def test_a_part_of_the_initial_values_is_that_part_of_them(
    shape: tuple[int, ...], region: tuple[tuple[int, int], ...], local: tuple[int, ...]
) -> None:
    """Also across rows, in padding, and where a rank has padding alone."""
    record = ParameterRecord("w", shape, region, local, Init(0.5), "matrices")
    whole = initial_value(record, 7).flatten()
    for start, stop in itertools.combinations(range(len(whole) + 1), 2):
        assert torch.equal(initial_part(record, 7, start, stop), whole[start:stop])


def test_all_replicas_together_draw_a_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draws the shard that it keeps, and at most one block at either end of it. Before, each drew everything."""
    drawn, randn = [], torch.randn
    monkeypatch.setattr(torch, "randn", lambda n, **kw: drawn.append(n) or randn(n, **kw))
    rows, replicas = 24, 8
    record = ParameterRecord("w", (rows, BLOCK // 2), ((0, rows), (0, BLOCK // 2)), (rows, BLOCK // 2), Init(1.0), "matrices")
    shard = record.local_numel // replicas
    for rank in range(replicas):
        drawn.clear()
        initial_part(record, 1, rank * shard, (rank + 1) * shard)
        assert shard <= sum(drawn) <= shard + 2 * BLOCK < record.local_numel


def test_a_health_check_of_memory_needs_little_beyond_what_it_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, comparing nine tenths of a device's memory took another quarter of that, and every healthy device was bad."""
    monkeypatch.setattr(health, "PIECE_BYTES", 1 << 16)
    with Sizes() as sizes:
        assert health._holds(torch.device("cpu"), 10 * (1 << 16) + 4000)
    assert sum(sizes.made) * 4 >= 10 << 16 and max(sizes.made) <= (1 << 16) // 4
