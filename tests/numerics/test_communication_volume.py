"""What rank 0 sends in a step is what the formulas say, call by call and byte by byte.

Formulas: Narayanan et al. 2021 section 3, Korthikanti et al. 2022 section 4.2, Rajbhandari et al. 2020 section 7, and for AMSP
a reduce-scatter and all-gather per level. Payload is the whole tensor of a collective; sizes are in elements of fp64.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.farm import Farm
from tests.small_runs import ranks, small

pytestmark = pytest.mark.slow

S, H, V, LAYERS, STEPS = 16, 64, 128, 2, 2
BLOCK = 12 * H * H + 13 * H
ENDS = {"embedding": V * H + S * H, "head": V * H + 2 * H}
SIZE = 8
MICRO = 2  # micro-batches of one replica
X = S * H  # one activation


def volumes(farm: Farm, exchange: str = "all_gather", **layout: Any) -> dict[str, tuple[float, float]]:
    """Calls and payload elements per step on rank 0."""
    data = layout.get("data", 1)
    config = small(
        steps=STEPS,
        model={"layers": LAYERS, "hidden": H, "heads": 4, "vocab": V, "seq": S, "tied": False},
        run={"global_batch": MICRO * data, "bucket_mb": 100, "context_exchange": exchange},
        **layout,
    )
    found = farm.train(config, ranks(layout)).checked().result["communication"]
    return {key: (v["calls"] / STEPS, v["payload_bytes"] / SIZE / STEPS) for key, v in found.items() if "world" not in key}


def test_tensor_parallelism_reduces_four_activations_per_layer(farm: Farm) -> None:
    """Also one for the embedding, one for the head's input gradient, and for the loss one maximum and two sums per token."""
    calls = MICRO * (4 * LAYERS + 2 + 2)
    elements = MICRO * (4 * LAYERS * X + 2 * X + 3 * S)
    assert volumes(farm, tensor=2) == {"all_reduce over tensor": (calls, elements)}


def test_full_recomputation_repeats_the_sum_behind_attention_but_not_the_one_that_ends_a_layer(farm: Farm) -> None:
    calls = MICRO * (5 * LAYERS + 2 + 2)
    elements = MICRO * (5 * LAYERS * X + 2 * X + 3 * S)
    assert volumes(farm, tensor=2, recompute="full") == {"all_reduce over tensor": (calls, elements)}


def test_sequence_parallelism_gathers_and_scatters_instead(farm: Farm) -> None:
    """Per layer 2 all-gathers and 2 reduce-scatters each way, and 2 all-gathers of the inputs that were saved cut. The head's input
    is gathered once, in backward."""
    replicated = LAYERS * 6 * H + S * H + 2 * H  # norms and row biases, positions, the last norm
    assert volumes(farm, tensor=2, sequence_parallel=True) == {
        "all_gather over tensor": (MICRO * (6 * LAYERS + 2), MICRO * (6 * LAYERS + 2) * X),
        "reduce_scatter over tensor": (MICRO * (4 * LAYERS + 2), MICRO * (4 * LAYERS + 2) * X),
        "all_reduce over tensor": (MICRO * 2 + 1, MICRO * 3 * S + replicated),
    }


def test_a_pipeline_sends_one_activation_per_micro_batch_and_boundary(farm: Farm) -> None:
    assert volumes(farm, pipeline=2) == {"send over pipeline up": (MICRO, MICRO * X)}


def test_tensor_ranks_send_a_replicated_boundary_once(farm: Farm) -> None:
    assert volumes(farm, pipeline=2, tensor=2)["send over pipeline up"] == (MICRO, MICRO * X / 2)


def test_interleaving_multiplies_what_a_pipeline_sends(farm: Farm) -> None:
    """Rank 0 holds stages 0 and 2: it sends both forward, and stage 2 backward."""
    found = volumes(farm, pipeline=2, virtual_pipeline=2, schedule="interleaved", stage_layers=[1, 0, 0, 1])
    assert found == {"send over pipeline up": (3 * MICRO, 3 * MICRO * X)}


def test_slices_send_the_same_elements_in_more_messages(farm: Farm) -> None:
    """Tensor ranks send a replicated slice once, where they divide it; each slice's weights are gathered and its gradients reduced."""
    cut = {"pipeline": 2, "schedule": "sliced_1f1b", "slices": 4, "slice_lengths": [1, 9, 4, 2]}
    assert volumes(farm, **cut) == {"send over pipeline up": (4 * MICRO, MICRO * X)}
    assert volumes(farm, **cut, tensor=2)["send over pipeline up"] == (4 * MICRO, MICRO * (1 + 9 + (4 + 2) / 2) * H)
    whole, sliced = (
        volumes(farm, data=2, sharding={"params": 2, "grads": 2, "optimizer": 2}, **more) for more in ({}, cut | {"pipeline": 1})
    )
    for way in ("all_gather", "reduce_scatter"):
        (calls, elements), (more, all_elements) = (next(v for k, v in found.items() if k.startswith(way)) for found in (whole, sliced))
        assert (more, all_elements) == (4 * calls, 4 * elements)


def whole(shards: int) -> int:
    """Elements of the one bucket, padded so that the shards are equal and aligned."""
    return padded(LAYERS * BLOCK + sum(ENDS.values()), shards)


def padded(n: int, shards: int) -> int:
    return math.ceil(n / (64 * shards)) * 64 * shards


def sharding(params: int, grads: int, optimizer: int) -> dict[str, int]:
    return {"params": params, "grads": grads, "optimizer": optimizer}


def test_data_parallelism_reduces_the_gradients_once(farm: Farm) -> None:
    assert volumes(farm, data=2) == {"all_reduce over data replicas": (1, whole(1))}


def test_zero_1_scatters_gradients_and_gathers_parameters_once(farm: Farm) -> None:
    assert volumes(farm, data=2, sharding=sharding(1, 1, 2)) == {
        "reduce_scatter over data optimizer": (1, whole(2)),
        "all_gather over data optimizer": (1, whole(2)),
    }


def test_zero_2_scatters_gradients_after_every_micro_batch(farm: Farm) -> None:
    assert volumes(farm, data=2, sharding=sharding(1, 2, 2)) == {
        "reduce_scatter over data grads": (MICRO, MICRO * whole(2)),
        "all_gather over data grads": (1, whole(2)),
    }


def test_zero_3_gathers_twice_and_scatters_once_per_micro_batch(farm: Farm) -> None:
    units = [padded(n, 2) for n in (*[BLOCK] * LAYERS, *ENDS.values())]
    assert volumes(farm, data=2, sharding=sharding(2, 2, 2)) == {
        "all_gather over data params": (2 * MICRO * len(units), 2 * MICRO * sum(units)),
        "reduce_scatter over data params": (MICRO * len(units), MICRO * sum(units)),
    }


def test_every_level_of_amsp_moves_only_what_the_level_below_left(farm: Farm) -> None:
    """Gradients in halves, optimizer states in quarters, all parameters: 4 replicas."""
    assert volumes(farm, data=4, sharding=sharding(1, 2, 4)) == {
        "reduce_scatter over data grads": (MICRO, MICRO * whole(4)),
        "reduce_scatter over data optimizer": (1, whole(4) / 2),
        "all_gather over data optimizer": (1, whole(4) / 2),
        "all_gather over data grads": (1, whole(4)),
    }


def test_hybrid_sharding_reduces_shards_between_groups(farm: Farm) -> None:
    units = [padded(n, 2) for n in (*[BLOCK] * LAYERS, *ENDS.values())]
    found = volumes(farm, data=4, sharding=sharding(2, 2, 2))
    assert found["all_reduce over data replicas"] == (len(units), sum(units) / 2)


def test_context_ranks_gather_keys_and_values_twice_and_scatter_their_gradients(farm: Farm) -> None:
    """In backward they are gathered again. Gradients of all parameters are summed over the ranks."""
    calls, each = MICRO * LAYERS, 2 * X  # keys and values of a whole sequence
    assert volumes(farm, context=2) == {
        "all_gather over context": (2 * calls, 2 * calls * each),
        "reduce_scatter over context": (calls, calls * each),
        "all_reduce over data replicas": (1, whole(1)),
    }


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_what_is_recomputed_gathers_keys_and_values_as_often(farm: Farm, recompute: str) -> None:
    assert volumes(farm, context=2, recompute=recompute)["all_gather over context"][0] == 2 * MICRO * LAYERS


def test_context_ranks_that_exchange_heads_send_queries_keys_values_and_outputs(farm: Farm) -> None:
    """Each way, of half a sequence the half of the heads that belongs to the other rank."""
    found = volumes(farm, context=2, exchange="all_to_all")
    assert found["all_to_all over context"] == (4 * MICRO * LAYERS, 2 * MICRO * LAYERS * 4 * X / 4)


def test_context_ranks_of_a_ring_pass_on_one_part_three_times_for_each_other_rank(farm: Farm) -> None:
    """Keys and values forward, the same backward, and their gradients: each time those of a quarter of a sequence."""
    messages = 3 * (4 - 1) * MICRO * LAYERS
    assert volumes(farm, context=4, exchange="ring")["send over context"] == (messages, messages * 2 * X / 4)


def test_wire_bytes_are_those_of_a_ring(farm: Farm) -> None:
    result = farm.train(small(steps=STEPS, tensor=4), 4).checked().result
    volume = result["communication"]["all_reduce over tensor"]
    assert volume["wire_bytes"] == pytest.approx(2 * 3 / 4 * volume["payload_bytes"], rel=1e-4)


def test_one_process_communicates_nothing(farm: Farm) -> None:
    assert farm.train(small(), 1).checked().result["communication"] == {}


E, D = 16, 8
PAIRS = {
    "family": "t5",
    "layers": 4,
    "encoder_layers": 2,
    "hidden": H,
    "heads": 4,
    "head_width": 16,
    "ffn": 96,
    "vocab": V,
    "seq": E,
    "decoder_seq": D,
}


def pair_volumes(farm: Farm, **layout: Any) -> dict[str, tuple[float, float]]:
    config = small(steps=STEPS, model=PAIRS, run={"global_batch": MICRO, "bucket_mb": 100}, **layout)
    found = farm.train(config, ranks(layout)).checked().result["communication"]
    return {key: (v["calls"] / STEPS, v["payload_bytes"] / SIZE / STEPS) for key, v in found.items() if "world" not in key}


@pytest.mark.parametrize("cut", ["in the encoder", "at its end", "in the decoder"])
def test_a_boundary_hands_on_both_streams_and_the_tables_wherever_it_is(farm: Farm, cut: str) -> None:
    """So every stage of the decoder gets the encoder's output once for each micro-batch."""
    split = {"in the encoder": [1, 3], "at its end": [2, 2], "in the decoder": [3, 1]}[cut]
    each = (E + D) * H + 2 * 32 * 4
    assert pair_volumes(farm, pipeline=2, stage_layers=split) == {"send over pipeline up": (3 * MICRO, MICRO * each)}


def test_tensor_ranks_sum_the_gradient_of_an_encoders_output_once_for_all_blocks(farm: Farm) -> None:
    """Four sums of each block's own stream, two more of a decoder's; embedding both streams, the head's input, and the loss."""
    calls = MICRO * (2 * 4 + 2 * 6 + 1 + 2 + 1 + 2)
    elements = MICRO * (2 * 4 * E * H + 2 * 6 * D * H + E * H + (E + D) * H + D * H + 3 * D)
    assert pair_volumes(farm, tensor=2) == {"all_reduce over tensor": (calls, elements)}
