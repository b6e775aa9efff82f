"""Invariants of the cost of inference, and the published points that a plan must reproduce."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from launcher.config.constants import constant_entries
from launcher.config.engine import released
from launcher.config.hardware import shipped_hardware
from launcher.config.schema import HardwareConfig
from launcher.config.trainers import engine, engine_names
from launcher.cost.inference import SERVING_DTYPE, HostCosts, InferenceCase, closed, opened, passes, static
from launcher.cost.inference import memory as bytes_of
from launcher.cost.inference.case import group, visited
from launcher.cost.inputs.device import Device
from launcher.cost.inputs.shape import Experts, LatentAttention, Shape

GPT_175B = Shape(layers=96, hidden=12288, heads=96, kv_heads=96, head_width=128, ffn=49152, vocab=51200, seq=2048)
LLAMA_8B = Shape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_width=128, ffn=14336, vocab=128256, seq=8192, gated=True, tied=False, biases=()
)


def asked(
    *layouts: tuple[int, int, int, int],
    shape: Shape = LLAMA_8B,
    name: str = "vllm",
    device: str = "h100",
    lengths: tuple[int, int] = (1024, 256),
    weights: str = "bf16",
) -> InferenceCase:
    """Layouts as (tensor, pipeline, replicas, batch)."""
    on = Device.of(shipped_hardware()[device], 8)
    return InferenceCase(shape, np.array(list(layouts), SERVING_DTYPE), lengths[0], lengths[1], on, engine(name), weights)


def test_the_published_configurations_of_175b_are_within_a_tenth_and_in_order() -> None:
    """NeMo launcher's README: 60 in, 20 out, A100-80; milliseconds of a batch."""
    found = static(
        asked(
            (8, 4, 1, 64),
            (8, 8, 1, 64),
            (8, 8, 1, 4),
            shape=GPT_175B,
            name="fastertransformer",
            device="a100_80",
            lengths=(60, 20),
            weights="fp16",
        )
    )
    published = np.array([2.121, 2.009, 0.971])
    assert np.abs(found.latency / published - 1).max() < 0.1
    assert found.latency.argsort().tolist() == published.argsort().tolist()
    assert (found.throughput / [32, 64, 64]).argmax() == 0, "per device tensor 8 x pipeline 4 serves most"


@pytest.mark.parametrize("name", engine_names())
def test_no_part_is_faster_than_the_speed_of_light(name: str) -> None:
    case = asked((1, 1, 1, 1), (4, 1, 2, 32), (2, 2, 1, 16), name=name)
    found = static(case) if case.engine.batching == "static" else closed(case)
    for parts, light in ((found.prompt, found.prompt_light), (found.step, found.step_light)):
        assert parts.keys() == light.keys()
        for part in parts:
            assert np.all(np.asarray(parts[part]) >= np.asarray(light[part]) * (1 - 1e-9)), part


@pytest.mark.parametrize("name", ["vllm", "sglang", "fastertransformer"])
def test_more_requests_in_flight_give_more_throughput_and_slower_tokens(name: str) -> None:
    found = (static if engine(name).batching == "static" else closed)(asked(*((2, 1, 1, b) for b in (1, 2, 8, 32, 64)), name=name))
    assert np.all(np.diff(found.tpot) > 0) and np.all(np.diff(found.throughput) > 0)


def on_host(*layouts: tuple[int, int, int, int], cores: int = 2, waking: float = 1.0) -> InferenceCase:
    """Our generator on a node of four ranks, of which every exchange that was waited for takes ``waking`` seconds times the ranks."""
    turn = dict.fromkeys(("turn", "block", "row", "logit"), 1e-4)
    woken = [
        {"operation": name, "size": size, "near": size, "seconds": waking * size}
        for name, size in (("all_reduce", 2), ("all_reduce", 4), ("all_gather", 2), ("all_gather", 4), ("send", 2))
    ]
    machine = HardwareConfig(name="mine", host=True, cores=cores, peak_tflops={"fp32": 0.1}, link_gbs=2.0, link_latency_us=50.0)
    case = asked(*layouts, shape=dataclasses.replace(LLAMA_8B, hidden=64, heads=4, vocab=64, layers=3), name="trireme", weights="fp32")
    return dataclasses.replace(case, device=Device.of(machine, 4), costs=HostCosts.of({"turn": turn, "waking": woken if waking else []}))


def test_every_exchange_of_the_host_takes_what_waking_its_ranks_takes_and_ranks_on_shared_cores_count_once() -> None:
    """Two sums a layer and one of the embedding, a message to each further stage, a sum of what was chosen; the gather of the logits is in
    the head. With a batch the news come on top."""
    layouts = (1, 1, 1, 1), (2, 1, 1, 1), (4, 1, 1, 1), (1, 2, 1, 1), (2, 2, 1, 1)
    slow, quick = static(on_host(*layouts)), static(on_host(*layouts, waking=1e-9))
    more = {part: np.asarray(slow.step[part]) - np.asarray(quick.step[part]) for part in slow.step}
    assert more["tensor-parallel communication"] == pytest.approx([0, 7 * 2, 7 * 4, 0, 7 * 2], abs=0.01)
    assert more["head"] == pytest.approx([0, 2, 4, 0, 2], abs=0.01)
    assert more["pipeline transfers"] == pytest.approx([0, 0, 0, 2, 2], abs=0.01)
    assert more["scheduling"] == pytest.approx([0, 2, 4, 2, 4], abs=0.01)
    news = np.asarray(slow.prompt["scheduling"]) - np.asarray(quick.prompt["scheduling"]) - more["scheduling"]
    assert news == pytest.approx([0, 2 * 2, 2 * 4, 2 * 2, 2 * 4], abs=0.01)


def test_a_file_in_which_no_waking_was_measured_takes_exchanges_as_in_a_burst() -> None:
    burst, woken = static(on_host((2, 2, 1, 4), waking=0.0)), static(on_host((2, 2, 1, 4)))
    assert 0 < burst.step["tensor-parallel communication"] < woken.step["tensor-parallel communication"]


def test_weights_in_8_bits_take_half_the_memory_and_less_time_per_token() -> None:
    wide, narrow = (closed(asked((1, 1, 1, 8), weights=weights)) for weights in ("bf16", "fp8"))
    assert narrow.memory[bytes_of.WEIGHTS] < 0.51 * wide.memory[bytes_of.WEIGHTS]
    assert narrow.tpot < wide.tpot and narrow.room > wide.room


def test_keys_and_values_of_a_replica_are_shared_out_and_grouped_heads_copied_beyond_their_number() -> None:
    case = asked(*((t, 1, 1, 1) for t in (1, 2, 8, 16)))
    assert bytes_of.per_sequence(case).tolist() == [bytes_of.per_sequence(case)[0] / n for n in (1, 2, 8, 8)]


def test_requests_beyond_the_room_wait_and_do_not_slow_those_that_run() -> None:
    room = int(closed(asked((1, 1, 1, 1))).room[0])
    full, crowded = closed(asked((1, 1, 1, room))), closed(asked((1, 1, 1, 2 * room)))
    assert crowded.tpot == pytest.approx(full.tpot) and crowded.ttft > full.ttft
    assert crowded.throughput == pytest.approx(full.throughput, rel=0.02)


@pytest.mark.parametrize("name", ["vllm", "sglang", "tensorrt_llm", "trireme"])
def test_a_static_batch_beyond_the_room_is_served_in_waves_and_one_within_it_at_once(name: str) -> None:
    """In as few as it takes, of equal size; an engine that serves static batches too runs out of memory."""
    room = int(static(asked((1, 1, 1, 1), name=name)).room[0])
    within, beyond, three = static(asked((1, 1, 1, room), (1, 1, 1, room + 2), (1, 1, 1, 3 * room), name=name)).latency
    half = static(asked((1, 1, 1, room // 2 + 1), name=name)).latency[0]
    if engine(name).batching == "continuous":
        assert beyond == pytest.approx(2 * half, rel=0.01) and three == pytest.approx(3 * within)
    else:
        assert beyond == pytest.approx(within, rel=0.01)
        assert (static(asked((1, 1, 1, room), (1, 1, 1, 2 * room), name=name)).fits > 0.5).tolist() == [True, False]


@pytest.mark.parametrize("ask", [static, closed])
def test_a_synchronous_host_is_waited_for_request_by_request_and_an_asynchronous_one_where_it_takes_longer_than_the_device(
    ask: Any,
) -> None:
    layouts = tuple((1, 1, 1, batch) for batch in (1, 16, 64))
    waited = {}
    for row in (1e-5, 1.0):  # seconds of the host per request
        for name, version, hidden in (("vllm", "0.13", False), ("vllm", "", True), ("sglang", "", True)):
            case = asked(*layouts, name=name)
            profile = released(dataclasses.replace(case.engine, version=version))
            found = ask(dataclasses.replace(case, engine=profile, constants=case.constants.on({"step": 1e-3, "row": row})))
            waited[hidden, row] = np.asarray(found.step["scheduling"])
            device = (
                np.asarray(sum(found.step.values())) - waited[hidden, row] - np.asarray(found.step.get("prompts of other requests", 0.0))
            )
            assert waited[hidden, row] == pytest.approx(
                np.maximum(1e-3 * (1 - case.constants.step_hidden), 1e-3 + row * case.batch - device) if hidden else 1e-3 + row * case.batch
            )
    assert np.ptp(waited[True, 1e-5]) == 0 and np.all(waited[True, 1.0] < waited[False, 1.0])


def test_a_small_sum_in_one_kernel_takes_the_same_for_any_ranks_of_a_node_and_a_librarys_longer_for_more() -> None:
    sums = {}
    for name in ("vllm", "fastertransformer"):
        case = asked(*((t, 1, 1, 1) for t in (2, 4, 8, 16)), shape=GPT_175B, name=name)
        sums[name] = np.asarray(static(case).step["tensor-parallel communication"])
    own, library = sums["vllm"], sums["fastertransformer"]
    assert np.ptp(own[:3]) < 0.2 * own[0] and np.all(np.diff(library) > 0.1 * library[0])
    assert own[3] == pytest.approx(library[3]), "such a kernel ends at the node"


def test_query_heads_that_do_not_share_read_the_keys_of_their_group_each_for_itself() -> None:
    case = asked((1, 1, 1, 8), (8, 1, 1, 8), (16, 1, 1, 8))
    apart = dataclasses.replace(case, engine=dataclasses.replace(case.engine, shared_keys=False))
    ratio = np.asarray(closed(apart).step["attention"]) / np.asarray(closed(case).step["attention"])
    assert ratio == pytest.approx([4, 4, 2]), "32 heads over 8; of 16 ranks each has two, and a copy of their keys"


def test_weights_of_four_bits_take_a_scale_of_eight_for_sixteen_of_them() -> None:
    weights = {form: bytes_of.fixed(asked((1, 1, 1, 1), weights=form), np.ones(1))[bytes_of.WEIGHTS] for form in ("fp8", "fp4")}
    assert weights["fp4"] == pytest.approx(4.5 / 8 * weights["fp8"], rel=1e-3)


def test_open_arrivals_keep_littles_law_and_a_rate_beyond_the_capacity_does_not_fit() -> None:
    case = asked((1, 1, 1, 1))
    for rate in (0.5, 4.0):
        found = opened(case, rate)
        assert found.fits > 0.9 and found.running == pytest.approx(rate * (found.latency - found.prompt["queue"]), rel=1e-3)
        assert found.throughput == pytest.approx(rate, rel=1e-3)
    assert opened(case, 1e4).fits == 0


def test_replicas_serve_as_many_times_more_at_the_same_latency() -> None:
    one, four = closed(asked((1, 1, 1, 16))), closed(asked((1, 1, 4, 16)))
    assert four.latency == one.latency and four.throughput == pytest.approx(4 * one.throughput)


def test_a_table_of_layouts_is_each_layout_alone() -> None:
    layouts = ((1, 1, 1, 1), (4, 2, 1, 24), (8, 1, 2, 7))
    together = closed(asked(*layouts))
    for i, layout in enumerate(layouts):
        assert closed(asked(layout)).latency[0] == pytest.approx(together.latency[i])


def test_a_pipeline_never_shortens_a_token_of_a_single_request_and_multiplies_the_room() -> None:
    found = closed(asked((1, 1, 1, 1), (1, 4, 1, 1)))
    assert found.tpot[1] > found.tpot[0] and found.room[1] > 3 * found.room[0]


GPT_530B = Shape(layers=105, hidden=20480, heads=128, kv_heads=128, head_width=160, ffn=81920, vocab=51200, seq=1)


def faster(*layouts: tuple[int, int, int, int], shape: Shape = GPT_530B, lengths: tuple[int, int] = (60, 20)) -> InferenceCase:
    """FasterTransformer in 16 bits on A100 of 80 GB."""
    case = asked(*layouts, shape=shape, name="fastertransformer", device="a100_80", lengths=lengths, weights="fp16")
    return dataclasses.replace(case, kv="fp16")


@pytest.mark.parametrize(("tensor", "pipeline", "group"), [(16, 1, 256), (8, 2, 16)])
def test_fastertransformers_buffers_are_those_that_its_code_allocates(tensor: int, pipeline: int, group: int) -> None:
    """One by one, in elements: of the whole batch outside of a layer, of a pipeline's group (1024 tokens at most) inside."""
    batch, read, hidden, heads = 256, 60, 20480, 128
    prompts = ["context_decoder_input_buf_", "context_decoder_output_buf_"]
    prompts += ["decoder_normed_input_", "self_attn_output_", "decoder_layer_output_"]
    inside = {"qkv_buf_": 3, "q_buf_2_, k_buf_2_, v_buf_2_": 3, "qkv_buf_2_": 1, "qkv_buf_3_": 1, "inter_buf_": 4}
    logits = {
        "logits_buf_, nccl_logits_buf_": 2,
        "top-k: runtime_logits_buf_, workspace": 2,
        "top-p: runtime_logits_buf_, ids, workspace": 2 + 4,
    }
    elements = len(prompts) * batch * read * hidden + sum(inside.values()) * group * read * hidden / tensor
    scores = group * heads / tensor * read**2 * (2 + 4) + batch * read**2 * 2  # qk_buf_, qk_buf_float_; tiled_input_attention_mask_
    vocabulary = sum(logits.values()) * batch * 51200 * 4
    case = faster((tensor, pipeline, 1, batch))
    assert bytes_of.buffers(case, case.batch).tolist() == pytest.approx([2 * elements + scores + vocabulary], rel=1e-9)


def test_an_engine_that_keeps_the_vocabulary_everywhere_holds_it_on_every_stage_and_others_a_half() -> None:
    stages = (8, 1, 1, 1), (8, 5, 1, 1)
    shape = dataclasses.replace(GPT_530B, tied=False)
    held = {name: bytes_of.fixed(asked(*stages, shape=shape, name=name), np.ones(2))[bytes_of.EMBEDDING] for name in engine_names()}
    shares = {name: last / one for name, (one, last) in held.items()}
    assert shares == {name: 1 if engine(name).memory.embedding_everywhere else 0.5 for name in engine_names()}
    assert held["fastertransformer"].tolist() == [2 * 51200 * 20480 * 2] * 2


GUIDE = {  # FasterTransformer's docs/gpt_guide.md, read in and generated tokens: 2**30 bytes by batch, but for one that it prints too high
    (32, 4096, 32): {(128, 8): {4: 15.87, 16: 17.19, 32: 18.84, 64: 22.17}, (512, 32): {1: 15.96, 8: 18.72, 16: 22.17, 32: 28.73}},
    (24, 2048, 32): {(128, 8): {2: 5.39, 8: 5.66, 16: 6.0, 64: 7.97}, (512, 32): {1: 5.58, 4: 5.97, 8: 6.64, 32: 10.52, 64: 15.61}},
    (24, 1024, 16): {(128, 8): {2: 3.46, 4: 3.51, 16: 3.78, 32: 4.13}, (512, 32): {1: 3.57, 4: 3.78, 16: 4.8, 32: 6.09, 64: 8.67}},
}


def test_published_memory_less_what_is_counted_is_the_same_runtime_for_every_model_batch_and_length() -> None:
    """As the release of 2021 allocates: a fifth more of every batch and length (``max_batch_size_ = batch_size * 1.2``), a mask of the longest
    length, one way to choose a token, and groups without a pipeline too (2048 tokens in the code that was published; 512 leave the least)."""
    left = []
    for (layers, hidden, heads), runs in GUIDE.items():
        shape = Shape(layers, hidden, heads, heads, hidden // heads, 4 * hidden, 51200, seq=1)
        for (read, made), printed in runs.items():
            longest = int(1.2 * (read + made + 1))
            lengths = int(1.2 * read), longest - int(1.2 * read)
            case = faster(*((1, 1, 1, int(1.2 * batch)) for batch in printed), shape=shape, lengths=lengths)
            memory = dataclasses.replace(case.engine.memory, split_buffers=0, logit_buffers=7)
            case = dataclasses.replace(case, engine=dataclasses.replace(case.engine, memory=memory, attention="flash"))
            group = np.minimum(np.array(list(printed)) * read, 512)
            inside = 12 * 2 * group * hidden + (2 + 4) * group * heads * read + 2 * case.batch * longest**2
            counted = sum(bytes_of.needed(case, case.batch).values()) - case.engine.memory.runtime_gb * 1e9 + inside
            left += list(np.array(list(printed.values())) * 2**30 - counted)
    assert np.abs(np.array(left) / 1e9 - engine("fastertransformer").memory.runtime_gb).max() < 0.06


def test_no_count_of_bytes_parts_the_published_batch_that_ran_beyond_the_memory_from_those_that_did_not() -> None:
    """530B: on 16 x 1 batch 128 of 128 tokens in and 8 out ran out of memory (the engine's guide); on 8 x 2 batch 256 of 60 in and 20 out is
    said to have run (the launcher's README of 2021-11, whose own configuration of that layout ends at batch 64)."""
    failed, ran = faster((16, 1, 1, 128), lengths=(128, 8)), faster((8, 2, 1, 256), (8, 2, 1, 64))
    need, less = (sum(bytes_of.needed(case, case.batch).values()) for case in (ran, failed))
    assert need[0] > less[0] > failed.device.memory > need[1]
    assert (static(ran).fits > 0.5).tolist() == [False, True]


def test_every_constant_is_told_with_its_prior_its_kind_and_its_source() -> None:
    for name, entry in constant_entries("inference").items():
        assert set(entry) == {"value", "default", "spread", "kind", "source"}, name
        assert entry["kind"] in ("fitted", "set") and entry["source"] and entry["default"] > 0
        assert (entry["spread"] is not None) == (entry["kind"] == "fitted"), name


def served_of_light(case: InferenceCase, throughput: np.ndarray) -> np.ndarray:
    """Products of the requests that are served per second, as a part of what the devices' peak computes."""
    s, devices = case.shape, case.tensor * case.pipeline * case.replicas
    each = 2 * (s.attention_parameters + s.mlp_parameters) * s.layers * (case.input + case.output - 1)
    return np.asarray(throughput * each / (devices * case.device.peak(case.weights)))


SHORT = (60, 20), (512, 1), (2000, 1), (4000, 4), (512, 128)


@pytest.mark.parametrize("name", ["vllm", "sglang", "tensorrt_llm", "trireme"])
@pytest.mark.parametrize("lengths", SHORT, ids=str)
def test_no_load_is_served_faster_than_its_prompts_are_read_at_the_speed_of_light(name: str, lengths: tuple[int, int]) -> None:
    """However many requests are in flight, and however many arrive: what is said to be served has been computed."""
    case = asked(*((t, 1, 1, b) for t in (1, 2) for b in (1, 16, 96, 256, 512)), name=name, device="a100_80", lengths=lengths)
    assert np.all(served_of_light(case, closed(case).throughput) <= 1)
    for rate in (1.0, 10.0, 100.0, 1e3, 1e4):
        found = opened(case, rate)
        assert np.all(served_of_light(case, found.throughput)[found.fits > 0] <= 1)


@pytest.mark.parametrize("name", ["vllm", "sglang", "tensorrt_llm"])
@pytest.mark.parametrize("lengths", [(4096, 128), (1000, 1000), (60, 20)], ids=str)
def test_every_prompt_of_a_closed_loop_is_waited_for_once_whichever_share_comes_before_the_first_token(
    name: str, lengths: tuple[int, int]
) -> None:
    case = asked(*((t, 1, 1, b) for t in (1, 8) for b in (1, 2, 7, 64)), name=name, lengths=lengths)
    assert np.all(bytes_of.room(case) >= case.batch)
    whole = []
    for share in (0.0, 0.3, 0.5, 1.0):
        found = closed(dataclasses.replace(case, constants=case.constants.on({"staggered": share, "waves": share})))
        first, further = (np.asarray(parts["prompts of other requests"]) for parts in (found.prompt, found.step))
        whole.append(first + (case.output - 1) * further)
    assert np.allclose(whole, whole[0], rtol=1e-9)
    more = [whole[0][rows] for rows in (slice(0, 4), slice(4, 8))]
    assert all(waits[0] == 0 and np.all(np.diff(waits) > 0) for waits in more)


def test_a_request_of_our_generator_waits_for_the_prompts_of_others_not_for_its_own_twice() -> None:
    """A cycle of a closed loop reads as many prompts as there are requests; alone nobody else's is read."""
    case = asked(*((1, 1, 1, b) for b in (1, 2, 8)), name="trireme", lengths=(512, 1))
    alone, two, eight = closed(case).ttft
    once = float(static(asked((1, 1, 1, 1), name="trireme", lengths=(512, 1))).ttft[0])
    assert alone == pytest.approx(once, rel=0.2) and alone < two < 2.2 * alone and two < eight < 8.8 * alone
    longer = closed(asked((1, 1, 1, 1), name="trireme", lengths=(512, 16)))
    assert longer.step["prompts of other requests"] == longer.prompt["prompts of other requests"] == 0


@pytest.mark.parametrize("name", ["vllm", "sglang", "tensorrt_llm"])
def test_a_pipelines_group_of_a_scheduler_never_shrinks_with_the_requests(name: str) -> None:
    case = asked(*((1, p, 1, b) for p in (2, 3, 8) for b in range(1, 65)), name=name)
    groups = group(case, 512.0, case.batch).reshape(3, 64)
    assert np.all(np.diff(groups, axis=1) >= 0) and np.all(groups * np.array([[2], [3], [8]]) >= np.arange(1, 65))
    needs = sum(bytes_of.needed(case, case.batch).values()).reshape(3, 64)
    assert np.all(np.diff(needs, axis=1) > 0)


@pytest.mark.parametrize("name", ["vllm", "sglang", "tensorrt_llm", "trireme"])
def test_more_requests_in_flight_never_lower_the_throughput_where_there_is_room(name: str) -> None:
    case = asked(*((1, 1, 1, b) for b in (1, 8, 32, 96, 128, 192, 256, 512)), name=name, device="a100_80", lengths=(60, 20))
    assert np.all(np.diff(closed(case).throughput) > 0)


@pytest.mark.parametrize("name", ["vllm", "sglang", "tensorrt_llm"])
def test_requests_that_wait_take_no_room_from_those_that_run(name: str) -> None:
    case = asked(*((1, p, 1, b) for p in (1, 8) for b in (8, 32, 64, 128, 256, 512)), name=name, device="v100_32", lengths=(1000, 4000))
    found = closed(case)
    for rows in (slice(0, 6), slice(6, 12)):
        assert len(set(found.room[rows])) == 1 and np.all(np.diff(found.throughput[rows]) >= -1e-9)
    full = dataclasses.replace(case, table=case.table.copy())
    full.table["batch"] = found.room
    capacity = case.device.memory * (1 if case.engine.memory.of_free else case.engine.memory.share)
    assert np.all(sum(bytes_of.needed(full, full.batch).values()) <= capacity)


@pytest.mark.parametrize("name", ["vllm", "sglang", "tensorrt_llm"])
def test_a_layout_fits_where_it_has_room_for_a_request(name: str) -> None:
    for length in range(10_000, 300_000, 5_000):
        found = closed(asked((1, 1, 1, 4), (2, 1, 1, 4), name=name, device="v100_32", lengths=(length, 100)))
        assert ((found.fits >= 0.5) == (found.room >= 1)).all(), length


def test_prompts_of_those_that_arrive_slow_the_tokens_of_those_that_run() -> None:
    """A turn of decoding is as long as if nobody came, and what all prompts of a second take of that second on top."""
    found = opened(asked((1, 1, 1, 1), name="sglang", lengths=(2000, 100)), 4.0)
    reading = float(found.step["prompts of other requests"][0] / found.tpot[0])
    alone = closed(asked((1, 1, 1, 1), name="sglang", lengths=(2000, 1)))
    once = float((alone.ttft - alone.prompt["scheduling"])[0])
    assert reading == pytest.approx(4.0 * once, rel=0.1)


def test_arrivals_at_a_host_whose_memory_is_not_known_are_predicted() -> None:
    found = opened(on_host((1, 1, 1, 1)), 1e-4)
    assert found.fits[0] > 0.99 and found.throughput[0] == pytest.approx(1e-4, rel=1e-3) and np.isfinite(found.latency).all()


def test_our_generator_lets_nothing_wait_so_that_a_loop_beyond_the_memory_does_not_fit() -> None:
    room = int(closed(asked((1, 1, 1, 1), name="trireme")).room[0])
    few, many = closed(asked((1, 1, 1, 8), (1, 1, 1, 4 * room), name="trireme")).fits
    assert few > 0.5 > many


MIXTRAL = dataclasses.replace(LLAMA_8B, vocab=32000, experts=Experts(8, 2, 14336))


def test_a_mixture_of_one_expert_is_the_model_with_that_mlp_but_for_its_routing() -> None:
    """The router's vector, five kernels, and the expert's result written and read once more."""
    layouts, one = [(1, 1, 1, 1), (2, 2, 1, 8), (4, 1, 2, 300)], dataclasses.replace(LLAMA_8B, experts=Experts(1, 1, LLAMA_8B.ffn))
    dense, mixture = asked(*layouts), asked(*layouts, shape=one)
    for tokens in (1.0, 100.0, 1e5):
        assert passes.products(mixture, tokens) == pytest.approx(passes.products(dense, tokens), rel=1e-3)
    routed = 2 * dense.constants.pointwise * LLAMA_8B.hidden * 2 / (dense.device.bandwidth * dense.network.bandwidth)
    load = passes.Load(running=100.0, context=1000.0)
    assert passes.pointwise(mixture, load) - passes.pointwise(dense, load) == pytest.approx(100 * routed * np.ones(3))
    assert passes.launching(mixture) - passes.launching(dense) == pytest.approx(5 * dense.constants.kernel_graph)
    assert bytes_of.matrices(mixture) == pytest.approx(bytes_of.matrices(dense), rel=1e-3)


def test_a_token_reads_the_experts_that_it_visits_and_many_tokens_read_all() -> None:
    case = asked((1, 1, 1, 1), shape=MIXTRAL)
    assert visited(case, 1.0) == pytest.approx(2) and visited(case, 2.0) == pytest.approx(8 * (1 - 0.75**2)) and visited(case, 500.0) == 8
    seconds = np.array([float(passes.products(case, tokens)[0]) for tokens in (1.0, 2.0, 4.0, 64.0)])
    read = np.array([2, 3.5, 8 * (1 - 0.75**4), 8]) * 3 * 4096 * 14336 + LLAMA_8B.attention_parameters + 4096 * 8
    assert seconds == pytest.approx(2 * read / (case.device.bandwidth * case.constants.weights_bandwidth), rel=1e-6)
    many = float(passes.products(case, 1e6)[0])
    work = 2e6 * (2 * 3 * 4096 * 14336 + LLAMA_8B.attention_parameters + 4096 * 8)
    assert many == pytest.approx(work / (case.device.rate("bf16") * case.constants.matrix), rel=1e-3)


def test_a_rank_holds_its_part_of_every_expert_and_leading_layers_without_any_are_counted() -> None:
    """Of 12 layers of which 3 lead without experts, the second of two stages has six with them."""
    shape = dataclasses.replace(LLAMA_8B, layers=12, ffn=1000, experts=Experts(64, 6, 500, 700, 3))
    attention, mlp, wide = shape.attention_parameters, 3 * 4096 * 1000, 3 * 4096 * (64 * 500 + 700)
    whole, half, split = bytes_of.matrices(asked((1, 1, 1, 1), (1, 2, 1, 1), (4, 1, 1, 1), shape=shape))
    assert whole == pytest.approx(12 * attention + 3 * mlp + 9 * (wide + 64 * 4096))
    assert half == pytest.approx(6 * (attention + wide + 64 * 4096))
    assert split == pytest.approx((12 * attention + 3 * mlp + 9 * wide) / 4 + 9 * 64 * 4096)
    assert whole + 12 * shape.small_parameters == pytest.approx(shape.layers * shape.block_parameters)


def test_a_window_ends_what_a_token_reads_and_a_wide_one_changes_nothing() -> None:
    """Five of six layers look back 512 tokens."""
    windows = [dataclasses.replace(LLAMA_8B, layers=30, window=window, full_every=6) for window in (0, 512, 9000)]
    none, near, wide = (asked((1, 1, 1, 64), shape=shape, lengths=(8000, 256)) for shape in windows)
    running = passes.Load(running=64.0, context=8000.0)
    reads = [float(passes.cached_attention(case, running)[0]) for case in (none, near, wide)]
    assert reads[1] == pytest.approx(reads[0] * (1 / 6 + 5 / 6 * 512 / 8000)) and reads[2] == pytest.approx(reads[0])
    prompts = [float(passes.prompt_attention(case, passes.Load(1.0, 8000.0))[0]) for case in (none, near, wide)]
    assert prompts[0] / 6 < prompts[1] < prompts[0] / 3 and prompts[2] == pytest.approx(prompts[0])


def test_latents_are_computed_with_longer_than_they_are_read_where_many_queries_share_them() -> None:
    latent = LatentAttention(1536, 512)
    case = asked((1, 1, 1, 1), shape=dataclasses.replace(LLAMA_8B, heads=128, kv_heads=128, latent=latent))
    seconds = float(passes.cached_attention(case, passes.Load(running=1.0, context=1e6))[0])
    assert seconds == pytest.approx(2e6 * 128 * (2 * 512 + 64) / (case.device.peak("bf16") * case.constants.flash))
    few = dataclasses.replace(case, shape=dataclasses.replace(case.shape, heads=8, kv_heads=8))
    read = 1e6 * 2 * (512 + 64) / (case.device.bandwidth * case.constants.kv_bandwidth)
    assert float(passes.cached_attention(few, passes.Load(running=1.0, context=1e6))[0]) == pytest.approx(read)
