"""Products beside frozen matrices (LoRA), texts packed into a row, weights in 8 bits: what they add to a step, mechanism by mechanism."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from launcher.config import compose, resolve
from launcher.config.trainers import changed, profile
from launcher.cost import CostModel
from launcher.cost.inputs.case import Case
from launcher.cost.inputs.layouts import to_table
from launcher.cost.inputs.shape import Shape
from launcher.cost.memory import activations
from launcher.cost.time import adapters, attention, block, collectives
from tests.cost.machines import cluster, layout, mixed
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.schema import TARGETS, LayoutConfig, ModelConfig, TuneConfig
from trainer.shared.run.tuning import added_parameters

MODEL = ModelConfig(family="llama", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, seq=4096)
APART, IN_PLACE = profile("megatron_core"), profile("trireme")
LORA = TuneConfig(method="lora", targets=["qkv"], rank=16)


def case(tune: TuneConfig = LORA, one: LayoutConfig | None = None, precision: str = "bf16", batch: int = 8, **keys: object) -> Case:
    trainer = changed(APART, {name.replace("__", "."): value for name, value in keys.items()})
    made = CostModel(cluster(8, "h100"), trainer).case(MODEL, to_table([one or layout(micro_batch=1)]), mixed(batch, precision), tune)
    return replace(made, trainer=trainer)


def test_low_rank_products_move_what_they_read_and_write_pass_by_pass() -> None:
    """Apart: forward x in, y out, y scaled and added (1 in, 6 out); backward x read and dx written and added (5 in), dy read twice and
    scaled (4 out). In place: forward y is read once more, backward dx."""
    ins, outs = 4096, 4096 + 2 * 1024
    passes = {"apart": (1 * ins + 6 * outs, 5 * ins + 4 * outs), "in place": (1 * ins + 2 * outs, 3 * ins + 2 * outs)}
    for name, trainer in (("apart", APART), ("in place", IN_PLACE)):
        asked = replace(case(replace(LORA, rank=1)), trainer=trainer)
        rate = asked.device.bandwidth * asked.constants.streaming
        for found, wide, kernels in zip(adapters.seconds(asked), passes[name], (2, 4)):
            assert found[0] - kernels * asked.constants.kernel == pytest.approx(2 * 4096 * wide / rate, rel=1e-3)


def test_the_rank_costs_nothing_until_it_computes_longer_than_it_reads() -> None:
    low, wider, square = (sum(adapters.seconds(case(replace(LORA, rank=rank))))[0] for rank in (8, 64, 1024))
    assert low < wider < 1.05 * low and square > 1.5 * wider


def test_every_target_adds_its_own_products_and_full_tuning_none() -> None:
    each = [sum(adapters.seconds(case(replace(LORA, targets=[target]))))[0] for target in TARGETS]
    assert min(each) > 0 and sum(adapters.seconds(case(replace(LORA, targets=list(TARGETS)))))[0] == pytest.approx(sum(each))
    assert sum(adapters.seconds(case(TuneConfig())))[0] == 0


def test_targets_of_a_recipe_are_in_its_prediction() -> None:
    """The keys of a tuning recipe reach the products, and through them the step."""
    words = ["recipe=llama_7b_lora", "hardware=h100"]
    few, all_of_them = (resolve(compose([*words, f"tune.targets={targets}"])) for targets in ("[qkv]", "[qkv,output,up,down]"))
    times = [CostModel(c.cluster).predict(c.model, c.layout, c.run, c.tune).step_time_s for c in (few, all_of_them)]
    assert times[1] > 1.02 * times[0]


def test_low_rank_products_apart_from_their_matrix_communicate_for_themselves() -> None:
    def sent(asked: Case, collective: object, width: int) -> float:
        bytes_of = asked.tokens * width * asked.width
        return float(asked.constants.skew * collective(asked.device, asked.constants, asked.tensor_group, bytes_of)[0])  # type: ignore[operator]

    gather, scatter, reduce = collectives.all_gather, collectives.reduce_scatter, collectives.all_reduce
    plain = case(one=layout(2, micro_batch=1))
    assert adapters.tensor_seconds(plain)[0][0] == pytest.approx(sent(plain, gather, 16))
    assert adapters.tensor_seconds(plain)[1][0] == pytest.approx(sent(plain, reduce, 16) + sent(plain, reduce, 4096))
    for overlap, again in (("none", 0), ("all", 1)):
        split = case(one=layout(2, micro_batch=1, sequence_parallel=True), overlap__tensor=overlap)
        assert adapters.tensor_seconds(split)[0][0] == pytest.approx(sent(split, gather, 16) + again * sent(split, gather, 4096))
        assert adapters.tensor_seconds(split)[1][0] == pytest.approx(sent(split, reduce, 16) + sent(split, scatter, 4096))
    row = case(replace(LORA, targets=["down"]), layout(2, micro_batch=1))
    assert adapters.tensor_seconds(row)[0][0] == pytest.approx(sent(row, reduce, 16) + sent(row, gather, 4096))
    for sequence, width, way in ((True, 2048, collectives.all_to_all), (False, 4096, gather)):
        exchanging = case(
            replace(LORA, targets=["down"]), layout(2, micro_batch=1, sequence_parallel=sequence), overlap__adapters_exchange=True
        )
        assert adapters.tensor_seconds(exchanging)[0][0] == pytest.approx(sent(exchanging, reduce, 16) + sent(exchanging, way, width))
    for silent in (case(), replace(plain, trainer=IN_PLACE), case(TuneConfig(), layout(2, micro_batch=1))):
        assert [float(way[0]) for way in adapters.tensor_seconds(silent)] == [0, 0]


def test_only_inputs_of_adapted_matrices_are_kept_beside_frozen_ones() -> None:
    kept = {
        target: float(np.ravel(activations.block(case(replace(LORA, targets=[target]))).everything)[0]) for target in ("qkv", "up", "down")
    }
    assert kept["up"] - kept["qkv"] == 2 * 4096 * 4096 and kept["down"] - kept["qkv"] == 2 * 4096 * 14336


def test_parameters_of_low_rank_products_are_those_that_the_trainer_makes() -> None:
    for targets in (["qkv"], ["output", "down"], list(TARGETS)):
        tune = replace(LORA, targets=targets)
        assert Shape.of(MODEL, tune).low_rank_parameters == added_parameters(resolve_model(MODEL), tune)


def packed(text: int, asked: Case | None = None) -> float:
    asked = asked or case(TuneConfig())
    return float(sum(attention.seconds(replace(asked, shape=replace(asked.shape, text=text))))[0])


def test_packed_texts_attend_within_themselves_and_end_in_the_middle_of_a_tile() -> None:
    """Half the text, half the scores, but for the tiles at its end and on the diagonal: texts of one and of two tiles fill half a tile more
    each way, 1.5 and 2.5, with as many and one more below."""
    assert 0.4 < packed(1024) / packed(2048) < 0.75 and packed(0) < packed(4096) < 1.1 * packed(0)
    free = case(TuneConfig())
    free = replace(free, device=replace(free.device, bandwidth=np.inf), constants=replace(free.constants, flash_ramp=100, kernel=0))
    per_text = [packed(text, free) / 4096 * text for text in (100, 200)]
    assert per_text[1] / per_text[0] == pytest.approx(2.5 * 3.5 / (1.5 * 2.5))


def test_no_text_is_too_short_to_be_read_and_written() -> None:
    """However fast the products are. Forward 2 passes of 2 bytes over queries and over keys; backward 26 bytes over queries, 4 passes over keys."""
    asked = case(TuneConfig())
    device = replace(asked.device, peaks=dict.fromkeys(asked.device.peaks, np.inf), exp_throughput=np.inf)
    rate = device.bandwidth * asked.constants.streaming
    least = 4096 * (4096 * (4 + 26) + 1024 * (4 + 8)) / rate
    assert packed(16, replace(asked, device=device)) == packed(0, replace(asked, device=device)) == pytest.approx(least)
    assert packed(200) > least


@pytest.mark.parametrize(("frozen", "once", "left"), [(False, True, 2 / 6), (False, False, 2 / 6), (True, False, 2 / 6), (True, True, 0)])
def test_weights_stored_in_8_bits_are_transposed_and_frozen_ones_only_ever_once(frozen: bool, once: bool, left: float) -> None:
    def weights(stored: bool) -> float:
        """Of a single micro-batch, without what grows with its size."""
        keys = {"kernels__cast_weights_once": once, "numbers__stores_low_precision": stored}
        tune = LORA if frozen else TuneConfig()
        one, two = (float(block.casts(case(tune, layout(micro_batch=n), "fp8", batch=1, **keys))[0]) for n in (1, 2))
        return 2 * one - two

    assert weights(True) / weights(False) == pytest.approx(left)
