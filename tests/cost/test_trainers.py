"""What trainers do differently, each difference alone: the same question with one property of the trainer changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from launcher.config.trainer import TrainerProfile
from launcher.config.trainers import changed, profile
from launcher.cost import CostModel, Prediction, predict
from launcher.cost.inputs import stages
from launcher.cost.inputs.case import Case
from launcher.cost.inputs.constants import SHIPPED
from launcher.cost.inputs.device import Device
from launcher.cost.inputs.groups import PlacedGroup
from launcher.cost.inputs.layouts import to_table
from launcher.cost.inputs.shape import Experts
from launcher.cost.memory import activations
from launcher.cost.memory import peak as memory
from launcher.cost.memory.peak import ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS
from launcher.cost.model import estimate
from launcher.cost.parts import ATTENTION, BUBBLE, EXPERT, GATHER, MATRICES, OFFLOAD, REDUCE, TENSOR
from launcher.cost.time import block, collectives, embedding_head, matmul
from launcher.cost.time import data_parallel as states
from tests.cost.machines import GPT_22B, HARDWARE, cluster, layout, mixed
from trainer.shared.run.schema import LayoutConfig, ModelConfig, ShardingConfig

LLAMA_13B = ModelConfig(family="llama", layers=40, hidden=5120, heads=40, ffn=13824, vocab=128000, seq=2048)
BASE = profile("megatron_lm_2023")


def asked(one: LayoutConfig, trainer: TrainerProfile, batch: int = 256, model: ModelConfig = GPT_22B) -> Prediction:
    gpus = one.tensor * one.pipeline * (one.data or 1)
    return predict(model, one, mixed(batch), cluster(gpus), trainer)


def step_of(case: Case) -> float:
    return float(estimate(case).step_time[0])


def cases(one: LayoutConfig, trainer: TrainerProfile, batch: int = 64, precision: str = "bf16", hardware: str = "h100") -> Case:
    return CostModel(cluster(64, hardware), trainer).case(GPT_22B, to_table([one]), mixed(batch, precision))


@pytest.mark.parametrize(("ranks", "first", "middle", "last"), [(2, 21, 21, 19), (4, 10, 11, 8), (8, 5, 6, 3)])
def test_stages_that_count_their_ends_as_blocks(ranks: int, first: int, middle: int, last: int) -> None:
    """43 items of a model of 40 blocks: embedding before them, norm and head behind them."""
    counting = changed(BASE, {"pipeline.counts_ends": True})
    table = to_table([layout(1, ranks, 1)])
    found = stages.blocks(CostModel(cluster(8), counting).case(LLAMA_13B, table, mixed(64)))
    assert (found.first[0], found.last[0]) == (first, last)
    assert ranks == 2 or found.middle[0] == middle


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 16, 40])
@pytest.mark.parametrize("vocab", [1000, 51200, 131072, 500000])
def test_a_stage_that_is_cut_by_cost_ends_with_the_block_that_passes_its_share(ranks: int, vocab: int) -> None:
    """Counted block by block, as nanotron deals them out; later stages may go without."""
    model = replace(LLAMA_13B, vocab=vocab)
    cutting = changed(BASE, {"pipeline.cuts_by_cost": True})
    case = CostModel(cluster(64), cutting).case(model, to_table([layout(1, ranks, 1)]), mixed(64))
    head = vocab * case.shape.hidden / (case.shape.block_parameters - case.shape.small_parameters)
    share, rank, counts = (model.layers + head) / ranks, 0, [0] * ranks
    for block_number in range(1, model.layers + 1):
        counts[rank] += 1
        rank += block_number > share * (rank + 1)
    found = stages.blocks(case)
    assert (found.first[0], found.last[0]) == (counts[0], counts[-1])
    assert ranks == 2 or max(counts[1:-1]) <= found.middle[0] <= max(counts[1:-1]) + 1


def test_without_a_pipeline_the_ends_do_not_matter() -> None:
    found = stages.blocks(
        CostModel(cluster(8), changed(BASE, {"pipeline.counts_ends": True})).case(LLAMA_13B, to_table([layout(8)]), mixed(64))
    )
    assert found.first[0] == found.last[0] == 40


def test_each_overlap_hides_its_own_communication() -> None:
    """Gathers of sharded parameters, and updated parameters on their way back, hide independently of each other."""
    sharded = layout(1, 1, 64, sharding=ShardingConfig(8, 8, 64))
    base = changed(BASE, {"overlap.gathers": True, "overlap.refresh": True})
    shown = [
        asked(sharded, changed(base, {"overlap.gathers": g, "overlap.refresh": r})).time[GATHER]
        for g in (True, False)
        for r in (True, False)
    ]
    both, refresh_shown, gathers_shown, neither = shown
    assert both < refresh_shown < neither and both < gathers_shown < neither
    assert neither - both == pytest.approx((refresh_shown - both) + (gathers_shown - both))


@pytest.mark.parametrize(("shards", "slower"), [((1, 1, 1), False), ((1, 1, 64), True), ((1, 64, 64), True), ((64, 64, 64), False)])
def test_gradients_of_shared_states_may_wait_for_the_end_of_backward(shards: tuple[int, int, int], slower: bool) -> None:
    one = layout(1, 1, 64, sharding=ShardingConfig(*shards))
    early, late = (
        asked(one, changed(BASE, {"overlap.gradients": True, "overlap.states_wait": flag})).time[REDUCE] for flag in (False, True)
    )
    assert (late > 1.2 * early) if slower else (late == early)


@pytest.mark.parametrize(("tensor", "slower"), [(1, False), (8, True)])
def test_collectives_of_tensor_ranks_keep_the_host(tensor: int, slower: bool) -> None:
    few, many = (block.collectives_started(cases(layout(tensor, 1, 8), changed(BASE, {"kernels.host_tensor": n}))) for n in (5, 50))
    assert all((long[0] == 10 * short[0] > 0) if slower else (long[0] == short[0] == 0) for short, long in zip(few, many))


def test_weights_that_stay_in_8_bits_are_cast_once_for_all_micro_batches() -> None:
    keeps = changed(profile("megatron_core"), {"kernels.cast_weights_once": True})
    casts_again = changed(keeps, {"kernels.cast_weights_once": False})
    one = layout(8, 1, 8, micro_batch=1)
    assert block.casts(cases(one, keeps, 64, "fp8"))[0] < 0.9 * block.casts(cases(one, casts_again, 64, "fp8"))[0]
    assert block.casts(cases(one, keeps, 8, "fp8"))[0] == pytest.approx(block.casts(cases(one, casts_again, 8, "fp8"))[0])


@pytest.mark.parametrize(
    ("precision", "scaled", "bytes_each"), [("fp8", False, 1), ("fp8", True, 2), ("fp4", False, 2), ("bf16", False, 2)]
)
def test_matrices_that_are_stored_in_8_bits_travel_in_8_unless_blocks_have_scales(precision: str, scaled: bool, bytes_each: int) -> None:
    storing = changed(profile("megatron_core"), {"numbers.stores_low_precision": True, "numbers.block_scaled": scaled})
    asking = cases(layout(2, 4, 8, sharding=ShardingConfig(1, 1, 8)), storing, precision=precision)
    held = stages.held(asking)
    dense, expert = (float(np.max(one)) for one in states.stored(asking, held))
    others = held.dense.most() - held.blocks.most() * held.matrices
    assert dense == pytest.approx(2 * float(np.max(others)) + bytes_each * float(np.max(held.blocks.most() * held.matrices)))
    assert expert == 0
    assert float(np.max(others)) < 0.25 * float(np.max(held.dense.most()))


@pytest.mark.parametrize(("precision", "part"), [("bf16", 1.0), ("fp8", 0.5), ("fp4", 0.25)])
def test_activations_that_are_cast_before_tensor_ranks_gather_them_travel_in_the_format_of_the_product(precision: str, part: float) -> None:
    """Of a block's six gathers (two forward, two of gradients, two of inputs again) and four reduce-scatters, only the gathers."""
    for low, width in ((False, 1.0), (True, part)):
        trainer = changed(profile("megatron_core"), {"overlap.tensor": "none", "numbers.gathers_low_precision": low})
        asked = cases(layout(8, 1, 8, sequence_parallel=True), trainer, precision=precision)
        payload = asked.tokens * asked.shape.hidden * 2
        gather = collectives.all_gather(asked.device, SHIPPED, asked.tensor_group, payload * width)
        scatter = collectives.reduce_scatter(asked.device, SHIPPED, asked.tensor_group, payload)
        nothing = np.zeros(1)
        ahead, back = block.tensor_seconds(asked, nothing, nothing, nothing)
        assert ahead + back == pytest.approx(SHIPPED.skew * (6 * gather + 4 * scatter))


def test_a_token_goes_to_each_domain_once_where_copies_are_made_there() -> None:
    """8 experts of 16 ranks on two nodes: half of 8 copies leave the node, or at most one."""
    device = Device.of(HARDWARE["h100"], 8)
    group, payload = PlacedGroup(16, 8, 8), 1e9
    copies = float(collectives.all_to_all(device, SHIPPED, group, payload))
    once = float(collectives.all_to_all(device, SHIPPED, group, payload, 2 / 8 * (1 - 0.5**8)))
    assert 3 < copies / once < 4.5


def test_tokens_hide_behind_another_micro_batch_only_where_the_trainer_overlaps_them() -> None:
    shape = replace(cases(layout(1, 1, 64), BASE).shape, experts=Experts(64, 8, 2048))
    table = to_table([layout(1, 1, 64)])
    table["expert"] = 16
    asking = [replace(cases(layout(1, 1, 64), changed(BASE, {"overlap.experts": o})), shape=shape, table=table) for o in (False, True)]
    shown, hidden = (block.times(each).forward[EXPERT][0] for each in asking)
    assert hidden < 0.95 * shown


def test_products_of_several_experts_run_below_the_rate_of_one() -> None:
    shape = replace(cases(layout(1, 1, 64), BASE).shape, experts=Experts(64, 8, 2048))
    asking = replace(cases(layout(1, 1, 64), BASE), shape=shape)
    slow, fast = (block.matrix_seconds(replace(asking, constants=replace(SHIPPED, grouped=g)))[0][0] for g in (0.5, 1.0))
    assert slow > 1.2 * fast


def test_buckets_that_are_filled_at_the_end_take_the_room_of_activations() -> None:
    deep = layout(8, 2, 4, recompute="full", micro_batch=4)
    early = changed(profile("megatron_deepspeed"), {"memory.buckets_at_end": False})
    late = profile("megatron_deepspeed")
    assert asked(deep, early).memory[memory.BUFFERS] == pytest.approx(3e9)
    assert asked(deep, late).memory[memory.BUFFERS] < 1e9
    assert asked(layout(8, 1, 4, recompute="full"), late).memory[memory.BUFFERS] == pytest.approx(3e9)


def test_blocks_in_host_memory_free_their_share_of_the_activations() -> None:
    one = layout(8, 1, 8, sequence_parallel=True)
    all_here, half = (asked(one, changed(BASE, {"memory.host_layers": n})).memory[memory.ACTIVATIONS] for n in (0, 24))
    assert half == pytest.approx(all_here / 2, rel=0.1)


def test_communicators_across_the_network_take_more_and_each_counts() -> None:
    near, far = (asked(layout(1, 1, n), BASE).memory[memory.CONTEXT] for n in (8, 16))
    assert far - near == pytest.approx((SHIPPED.far_communicator_gb - SHIPPED.communicator_gb) * 1e9)
    three = changed(BASE, {"memory.communicators.pipeline": 3})
    deep = layout(8, 4, 1)
    assert asked(deep, three).memory[memory.CONTEXT] - asked(deep, BASE).memory[memory.CONTEXT] == pytest.approx(
        2e9 * SHIPPED.far_communicator_gb
    )


def test_stages_wait_for_the_slowest_of_them_and_a_single_one_for_none() -> None:
    shapes = [(1, 1), (8, 1), (8, 2), (8, 4), (8, 8)]
    steady, uneven = (
        [step_of(replace(cases(layout(t, p, 1), BASE), constants=replace(SHIPPED, jitter=jitter))) for t, p in shapes]
        for jitter in (0.0, 0.05)
    )
    slower = [b / a for a, b in zip(steady, uneven)]
    assert slower[:2] == pytest.approx([1, 1]) and slower == sorted(slower) and 1.01 < slower[2] < slower[4] < 1.11


def test_frozen_weights_are_not_renewed_and_keep_no_inputs_for_their_gradients() -> None:
    trained = cases(layout(8, 1, 8, sharding=ShardingConfig(optimizer=8)), BASE)
    adapters = frozen(trained)
    one, other = (states.work(case, stages.held(case)) for case in (trained, adapters))
    assert np.all(one.refresh > 0) and np.all(one.reduce > 0)
    assert np.all(other.refresh == 0) and np.all(other.reduce == 0) and np.all(other.optimizer == 0)
    assert activations.block(adapters).everything[0] < activations.block(trained).everything[0]


def frozen(case: Case) -> Case:
    return replace(case, shape=replace(case.shape, frozen=True))


def test_a_frozen_head_has_no_weight_gradient_and_a_frozen_embedding_no_backward() -> None:
    full = cases(layout(8, 1, 8), BASE)
    ahead, back = (part - left for part, left in zip(embedding_head.head(full), embedding_head.head(frozen(full))))
    product = matmul.seconds(full.device, "bf16", full.constants, full.vocabulary, full.shape.hidden, full.tokens)
    assert (ahead, back[0]) == (0, pytest.approx(product[0]))
    assert embedding_head.embedding(full)[1][0] > 0 == embedding_head.embedding(frozen(full))[1][0]


def test_inputs_are_gathered_again_for_weight_gradients_alone() -> None:
    full = cases(layout(8, 1, 8, sequence_parallel=True), changed(profile("megatron_core"), {"overlap.tensor": "none"}))
    ahead, back = (part - left for part, left in zip(*(block.tensor_seconds(case, 0.0, 0.0, 0.0) for case in (full, frozen(full)))))
    gather = collectives.all_gather(full.device, full.constants, full.tensor_group, full.tokens * full.shape.hidden * full.width)
    assert (ahead[0], back[0]) == (0, pytest.approx(2 * full.constants.skew * gather[0]))
    started = [block.collectives_started(case)[1][0] for case in (full, frozen(full))]
    assert started[0] - started[1] == 2 * full.trainer.kernels.host_tensor


def test_zero_bubble_has_nothing_to_put_off_where_weights_are_frozen() -> None:
    late, plain = (frozen(cases(layout(1, 8, 1, schedule=name), BASE, 8)) for name in ("zero_bubble", "1f1b"))
    assert step_of(late) == pytest.approx(step_of(plain))


def test_shards_summed_by_all_reduce_travel_twice() -> None:
    one = layout(1, 1, 64, sharding=ShardingConfig(params=64, grads=64, optimizer=64))
    scattered, summed = (
        states.work(case, stages.held(case)).scatter[0]
        for case in (cases(one, changed(profile("deepspeed"), {"overlap.all_reduces_shards": flag})) for flag in (False, True))
    )
    assert 1.3 < summed / scattered < 2  # an all-reduce waits for a tree, not for a ring


def test_updated_parameters_climb_each_level_with_the_bytes_of_the_level_above() -> None:
    """How far parameters are sharded beyond says nothing of what is gathered into the shard of gradients."""
    both, upper, lower = (
        float(states.work(case, stages.held(case)).refresh[0])
        for case in (cases(layout(1, 1, 8, sharding=ShardingConfig(*shards)), BASE) for shards in ((1, 2, 4), (1, 2, 2), (2, 2, 4)))
    )
    assert lower == pytest.approx(both - upper) and upper > lower > 0


@pytest.mark.parametrize("width", [2, 8, 64, 1024])
def test_owners_wait_for_the_ring_one_after_the_other(width: int) -> None:
    """A rank that updates whole tensors broadcasts them; there are no more owners than tensors, and the bytes are those of one gather."""
    one = to_table([layout(1, 1, width, sharding=ShardingConfig(optimizer=width))])

    def refresh(flag: bool) -> tuple[Case, float]:
        trainer = changed(profile("internevo"), {"overlap.owners_broadcast": flag})
        case = CostModel(cluster(width), trainer).case(GPT_22B, one, mixed(2048, "bf16"))
        return case, float(states.work(case, stages.held(case)).refresh[0])

    (case, sent), (_, gathered) = refresh(True), refresh(False)
    ring = collectives.ring_latency(case.device, case.constants, PlacedGroup.of(case.device, np.array([width]), np.array([1])))[0]
    owners = min(width, states.TENSORS * GPT_22B.layers + 3)
    assert gathered + 0.9 * (owners - 1) * ring < sent < 2.5 * gathered + owners * ring


def test_a_trainer_of_which_nothing_is_known_has_the_kernels_of_its_day_on_new_devices() -> None:
    unknown = profile("unknown")
    assert [cases(layout(8), unknown, hardware=name).trainer.kernels.newest_attention for name in ("a100_80", "h100", "b200")] == [
        False,
        True,
        True,
    ]


def test_more_exponentials_a_second_shorten_attention_alone() -> None:
    one = cases(layout(8, 1, 8), BASE, hardware="gb200")
    faster = replace(one, device=replace(one.device, exp_throughput=2.0))
    before, after = (block.times(each).forward for each in (one, faster))
    assert after[ATTENTION][0] < before[ATTENTION][0]
    assert after[MATRICES][0] == before[MATRICES][0]


def test_bytes_kept_by_policies_are_ordered() -> None:
    """Keeping every second product saves more than keeping all of them; both keep less than everything and more than the block's input."""
    kept = []
    for kind in ("per_op", "products"):
        one = cases(layout(1, 1, 8, recompute="selective"), changed(profile("torchtitan"), {"recompute.selective": kind}))
        kept.append(activations.block(one))
    everything = float(np.asarray(kept[0].everything)[0])
    per_op, products = (float(np.asarray(each.chosen)[0]) for each in kept)
    assert 0 < per_op < products < everything


def test_recomputation_that_stops_early_leaves_out_the_product_that_ends_a_block() -> None:
    """A third of a GPT block's products (4 h^2 of 12 h^2) and one of its two sums over tensor ranks."""
    full, plain = layout(8, 1, 1, recompute="full"), layout(8, 1, 1)
    whole, early, none = (
        asked(how, changed(BASE, {"recompute.stops_early": stops}), 8).time for how, stops in ((full, False), (full, True), (plain, True))
    )
    assert (whole[MATRICES] - early[MATRICES]) / (whole[MATRICES] - none[MATRICES]) == pytest.approx(1 / 3, abs=0.03)
    assert (whole[TENSOR] - early[TENSOR]) / (whole[TENSOR] - none[TENSOR]) == pytest.approx(1 / 2)


def test_attention_that_is_kept_is_not_recomputed_and_takes_the_room_of_its_output() -> None:
    full = layout(8, 1, 1, recompute="full", sequence_parallel=True)
    plain = asked(layout(8, 1, 1, sequence_parallel=True), BASE, 8)
    again, kept = (asked(full, changed(BASE, {"recompute.keeps_attention": keeps}), 8) for keeps in (False, True))
    assert kept.time[ATTENTION] == pytest.approx(plain.time[ATTENTION]) and again.time[ATTENTION] > 1.1 * kept.time[ATTENTION]
    assert again.time[MATRICES] == kept.time[MATRICES] > plain.time[MATRICES]
    outputs = GPT_22B.layers * GPT_22B.seq * (GPT_22B.hidden * 2 + GPT_22B.heads * 4) / 8
    assert kept.memory[ACTIVATIONS] - again.memory[ACTIVATIONS] == pytest.approx(outputs, rel=0.1)


def test_block_inputs_and_optimizer_states_move_to_host_memory_each_alone() -> None:
    """Inputs of 48 blocks, a part of each on 8 tensor ranks, there and back; or the shard's gradients and weights."""
    full = layout(8, 1, 8, recompute="full", sharding=ShardingConfig(8, 8, 8))
    here = changed(profile("deepspeed"), {"recompute.sharded_inputs": True})
    both_here, inputs, states_there = (
        asked(full, changed(here, change), 8) for change in ({}, {"recompute.inputs_on_host": True}, {"memory.optimizer_on_host": True})
    )
    held = GPT_22B.layers * GPT_22B.seq * GPT_22B.hidden * 2 / 8
    assert both_here.time[OFFLOAD] == 0
    assert inputs.time[OFFLOAD] == pytest.approx(2 * held / SHIPPED.host_link)
    assert both_here.memory[ACTIVATIONS] - inputs.memory[ACTIVATIONS] == pytest.approx(held)
    assert inputs.memory[OPTIMIZER] == both_here.memory[OPTIMIZER] > states_there.memory[OPTIMIZER] == 0
    assert states_there.memory[ACTIVATIONS] == both_here.memory[ACTIVATIONS] and states_there.time[OFFLOAD] > 0


def test_gradients_that_backward_allocates_take_the_room_of_inputs_that_it_frees() -> None:
    """So they count only as far as they are larger."""
    sharded = layout(1, 1, 64, recompute="full", sharding=ShardingConfig(64, 64, 64))
    early, late, no_room = (
        asked(sharded, changed(profile("deepspeed"), {"memory.late_gradients": late, "recompute.inputs_on_host": there}), 64).memory[
            GRADIENTS
        ]
        for late, there in ((False, False), (True, False), (True, True))
    )
    inputs = GPT_22B.layers * GPT_22B.seq * GPT_22B.hidden * 2
    assert late == pytest.approx(max(early - inputs, 0.0)) and no_room == early


def test_at_most_the_live_parameters_are_whole_at_a_time() -> None:
    sharded = layout(1, 1, 64, sharding=ShardingConfig(64, 64, 64))
    many, few = (asked(sharded, changed(profile("deepspeed"), {"memory.live_parameters": n}), 64).memory[WEIGHTS] for n in (1e12, 1e8))
    two_blocks = 2 * 12 * GPT_22B.hidden**2 * 2
    assert many - few == pytest.approx(two_blocks - 1e8 * 2, rel=0.01)


def test_under_a_pipeline_parameters_that_stay_whole_are_gathered_once_and_take_their_room() -> None:
    """16 micro-batches: one gather for both ways instead of 32, one reduction instead of 16; all weights in 16 bits, all gradients in 4 bytes."""
    staged, alone = (layout(2, p, 16 // p, sharding=ShardingConfig(16 // p, 16 // p, 16 // p)) for p in (4, 1))
    plain, whole = (
        changed(profile("torchtitan"), {"overlap.gathers": False, "overlap.gradients": False, "pipeline.whole_parameters": w})
        for w in (False, True)
    )
    often, once = asked(staged, plain, 64, LLAMA_13B), asked(staged, whole, 64, LLAMA_13B)
    assert often.time[GATHER] == pytest.approx(32 * once.time[GATHER], rel=0.01)
    assert often.time[REDUCE] == pytest.approx(16 * once.time[REDUCE], rel=0.01)
    assert once.memory[GRADIENTS] - often.memory[GRADIENTS] == pytest.approx(4 * once.memory[GRADIENTS] / 5, rel=0.05)
    assert once.memory[WEIGHTS] > 1.4 * often.memory[WEIGHTS]
    assert asked(alone, plain, 64) == asked(alone, whole, 64)


def test_under_a_pipeline_gradients_that_wait_for_the_last_backward_wait_whether_parameters_are_sharded_or_not() -> None:
    """ZeRO-2 as ZeRO-3: one reduction a step, and whole gradients until then; 16 reductions and no whole gradients without that."""
    two = layout(2, 4, 4, sharding=ShardingConfig(1, 4, 4))
    plain, last = (
        changed(profile("torchtitan"), {"overlap.gathers": False, "overlap.gradients": False, "pipeline.whole_parameters": w})
        for w in (False, True)
    )
    often, once = asked(two, plain, 64, LLAMA_13B), asked(two, last, 64, LLAMA_13B)
    three = asked(layout(2, 4, 4, sharding=ShardingConfig(4, 4, 4)), last, 64, LLAMA_13B)
    assert often.time[REDUCE] == pytest.approx(16 * once.time[REDUCE], rel=0.05)
    assert once.time[REDUCE] == pytest.approx(three.time[REDUCE], rel=0.05)  # in one piece, not block by block
    assert once.memory[GRADIENTS] == pytest.approx(three.memory[GRADIENTS], rel=0.01)
    assert once.memory[GRADIENTS] > often.memory[GRADIENTS]


def test_sharded_gradients_are_reduced_after_every_micro_batch() -> None:
    """Of 16 micro-batches, ZeRO-2 reduces each, ZeRO-1 their sum; what is left of ZeRO-2's is the same."""
    bare = changed(profile("fsdp"), {"overlap.gathers": False, "overlap.gradients": False, "overlap.refresh": False})
    one, two = (layout(1, 1, 16, sharding=ShardingConfig(1, grads, 16)) for grads in (1, 16))
    summed, often = (asked(each, bare, 256).time[REDUCE] for each in (one, two))
    assert often == pytest.approx(16 * summed, rel=0.01)
    assert asked(two, changed(bare, {"overlap.reduce_every_micro_batch": False}), 256).time[REDUCE] == pytest.approx(summed, rel=0.01)
    assert (
        asked(two, changed(profile("trireme"), {"overlap.gradients": False}), 256).time[REDUCE]
        > 10 * asked(one, changed(profile("trireme"), {"overlap.gradients": False}), 256).time[REDUCE]
    )


def test_a_second_of_computation_hides_one_communication() -> None:
    """On a slow network more computation never makes a step shorter."""
    slow = cluster(64)
    slow.hardware = replace(slow.hardware, network_gbs=1.0)
    steps = []
    for micro_batch in (1, 2, 4, 8):
        one = layout(1, 1, 64, micro_batch=micro_batch, sharding=ShardingConfig(64, 64, 64))
        steps.append(predict(LLAMA_13B, one, mixed(64 * 4 * micro_batch), slow, profile("fsdp")).step_time_s)
    assert steps == sorted(steps)


def test_chunks_hide_more_of_what_is_reduced_and_gathered_once_a_step() -> None:
    """Not of what a single micro-batch hides anyway: here both take much longer than its passes."""
    slow = replace(cluster(64), hardware=replace(HARDWARE["h100"], network_gbs=1.0))
    one, two, three = (
        predict(GPT_22B, layout(2, 4, 8, micro_batch=1, virtual_pipeline=chunks), mixed(64), slow, profile("megatron_core")).time
        for chunks in (1, 2, 4)
    )
    for part in (REDUCE, GATHER):
        assert one[part] > two[part] > three[part] > 0


def test_context_ranks_share_states_and_add_up_gradients_like_replicas() -> None:
    bare = changed(profile("megatron_core"), {"overlap.gathers": False, "overlap.gradients": False, "overlap.refresh": False})
    replicas = cases(layout(1, 1, 8), bare)
    table = to_table([layout(1, 1, 1, context=8, sharding=ShardingConfig(1, 1, 8))])
    context = replace(replicas, table=table)
    found, wanted = (states.work(case, stages.held(case)) for case in (context, replicas))
    assert (found.reduce[0], found.refresh[0], found.optimizer[0]) == pytest.approx(
        (wanted.reduce[0], wanted.refresh[0], wanted.optimizer[0])
    )


def test_gradients_of_experts_are_reduced_once() -> None:
    """Fully sharded: each expert's over the replicas that have it, so that 8 expert ranks leave an eighth of the ranks and of the bytes."""
    bare = changed(profile("fsdp"), {"overlap.gathers": False, "overlap.gradients": False})
    one = cases(layout(1, 1, 64, expert=8, sharding=ShardingConfig(64, 64, 64)), bare)
    mixture = replace(one, shape=replace(one.shape, experts=Experts(8, 2, one.shape.ffn)))
    held = stages.held(mixture)
    dense = states.work(one, stages.held(one))
    found = states.work(mixture, held)
    bytes_more = float(np.ravel(held.expert.most())[0]) * 4 * 7 / 8
    rate = collectives.bus(one.device, one.constants, one.data_group(8, 8))
    assert found.reduce[0] < 1.1 * dense.reduce[0] + 1e-3
    assert found.scatter[0] - dense.scatter[0] < 1.2 * bytes_more / rate[0]


@pytest.mark.parametrize(
    "trainer", [profile("deepspeed"), profile("megatron_deepspeed"), profile("nemo"), profile("trireme")], ids=lambda f: f.name
)
@pytest.mark.parametrize("pipeline", [1, 4])
def test_larger_micro_batches_and_kept_activations_never_need_less_memory(trainer: TrainerProfile, pipeline: int) -> None:
    """What the update needs once backward's activations are gone is a peak of its own, not room that is freed several times over."""
    kinds, sizes = ("full", "selective", "none"), (1, 2, 4)
    for tensor, data in ((8, 1), (1, 4)):
        layouts = [[layout(tensor, pipeline, data, micro_batch=b, recompute=r) for b in sizes] for r in kinds]
        needs = np.array([[asked(one, trainer, 64, LLAMA_13B).memory_bytes for one in row] for row in layouts])
        assert (np.diff(needs, axis=0) >= 0).all() and (np.diff(needs, axis=1) >= 0).all()


def test_more_gathers_per_block_pay_their_way_through_the_network_more_often() -> None:
    one = layout(1, 1, 1024, sharding=ShardingConfig(1024, 1024, 1024))
    bare = changed(profile("deepspeed"), {"overlap.gathers": False})
    few, many = (asked(one, changed(bare, {"overlap.gathers_per_block": n}), 1024).time[GATHER] for n in (1.0, 4.0))
    way = 128 * 7 * 5e-6 + 127 * 10e-6  # a ring over 128 nodes of 8 ranks, with the latencies of h100.yaml
    assert many - few == pytest.approx(2 * 3 * GPT_22B.layers * (way + SHIPPED.launch), rel=0.3)


def test_weight_gradients_of_16_bits_take_the_time_of_16_bits() -> None:
    one = layout(8, 1, 8, micro_batch=1)
    found = [
        block.matrix_seconds(cases(one, changed(BASE, {"numbers.wide_weight_gradients": wide}), 64, precision))
        for wide, precision in ((True, "fp8"), (False, "fp8"), (True, "bf16"))
    ]
    (ahead, back, weights), (all_ahead, all_back, all_weights), (_, _, sixteen) = ([float(x[0]) for x in each] for each in found)
    assert (ahead, back) == (all_ahead, all_back)
    assert weights == pytest.approx(sixteen) and all_weights < 0.8 * weights


def test_casts_in_tensor_operations_move_six_times_the_bytes() -> None:
    one = layout(8, 1, 8, micro_batch=1)
    kernel, eager = (block.casts(cases(one, changed(BASE, {"kernels.eager_casts": e}), 64, "fp8"))[0] for e in (False, True))
    assert eager / kernel == pytest.approx(35 / 6)


@pytest.mark.parametrize(("scaled", "left"), [(False, 5 / 6), (True, 5 / 12)], ids=["tensors", "blocks"])
def test_copies_that_only_a_weight_gradient_reads_are_not_made_beside_frozen_weights(scaled: bool, left: float) -> None:
    """Weights are cast for both products as before: here once for many micro-batches."""
    trainer = changed(BASE, {"numbers.block_scaled": scaled, "kernels.cast_weights_once": True})
    full = cases(layout(8, 1, 1, micro_batch=1), trainer, 4096, "fp8")
    frozen = replace(full, shape=replace(full.shape, frozen=True))
    assert block.casts(frozen)[0] / block.casts(full)[0] == pytest.approx(left, rel=0.01)


@pytest.mark.parametrize(("policy", "part", "parameters"), [("but_queries", 5 / 12, 3 * 1), ("but_projections", 4 / 12, 3 + 1)])
def test_policies_that_keep_projections_repeat_the_rest_of_the_products(policy: str, part: float, parameters: int) -> None:
    """Of a GPT block's 12 h^2: 3 for queries, keys and values, 1 behind attention, 4 and 4 of the MLP, whose last nothing in backward asks for."""
    selective, full = layout(1, 1, 8, recompute="selective"), layout(1, 1, 8, recompute="full")
    trainer = changed(BASE, {"recompute.selective": policy})
    plain, some, all_of_it = (block.times(cases(how, trainer)) for how in (layout(1, 1, 8), selective, full))
    assert plain.again[MATRICES][0] == 0
    assert some.again[MATRICES][0] / all_of_it.again[MATRICES][0] == pytest.approx(part, abs=0.03)
    assert some.again[ATTENTION][0] == all_of_it.again[ATTENTION][0]
    kept = float(np.asarray(activations.block(cases(selective, trainer)).chosen)[0])
    assert kept == pytest.approx((1 + parameters) * GPT_22B.seq * GPT_22B.hidden * 2)


@pytest.mark.parametrize("trainer", [profile("vocabulary_parallelism_1"), profile("interlaced")])
def test_a_spread_vocabulary_makes_stages_equal(trainer: TrainerProfile) -> None:
    """Embedding and head of 256 k tokens on 8 stages of 4 blocks: as much work as 14 blocks at the ends, or the same on every stage."""
    model = ModelConfig(layers=32, hidden=3072, heads=24, vocab=256000, seq=2048)
    one = layout(1, 8, 1)
    piled, spread = (predict(model, one, mixed(128, "fp16"), cluster(8), how) for how in (BASE, trainer))
    assert spread.time[BUBBLE] < 0.1 * spread.step_time_s < piled.time[BUBBLE]
    assert spread.memory[WEIGHTS] < 0.7 * piled.memory[WEIGHTS], "the last stage no longer holds the whole head"
    held = stages.held(CostModel(cluster(8), trainer).case(model, to_table([one]), mixed(128)))
    assert held.dense.first[0] == held.dense.last[0] == pytest.approx(held.dense.middle[0])


def test_more_micro_batches_in_flight_need_more_memory_and_no_more_time() -> None:
    one, bare = layout(1, 8, 1), changed(profile("vocabulary_parallelism_1"), {"pipeline.extra_in_flight": 0})
    few, more, most = (
        asked(one, changed(bare, {"pipeline.extra_in_flight": m, "pipeline.extra_in_flight_per_stage": n}), 64)
        for m, n in ((0, 0), (2, 0), (0, 0.5))
    )
    assert few.memory[ACTIVATIONS] < more.memory[ACTIVATIONS] < most.memory[ACTIVATIONS]
    assert few.step_time_s == more.step_time_s == most.step_time_s


def test_gradients_that_all_ranks_sum_travel_twice_where_they_hold_whole_parameters() -> None:
    """ZeRO-1 and 2 of DeepSpeed; with ZeRO-3 each rank gets its part alone."""

    def moved(flag: bool, **shards: int) -> float:
        trainer = changed(profile("deepspeed"), {"overlap.all_reduces_states": flag})
        case = cases(layout(1, 1, 64, sharding=ShardingConfig(**shards)), trainer)
        work = states.work(case, stages.held(case))
        return float(work.scatter[0] + work.reduce[0])

    for shards in ({"optimizer": 64}, {"grads": 64, "optimizer": 64}):
        assert 1.3 < moved(True, **shards) / moved(False, **shards) <= 2.01
    assert moved(True, params=64, grads=64, optimizer=64) == moved(False, params=64, grads=64, optimizer=64)
