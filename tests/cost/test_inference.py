"""Invariants of the cost of inference, and the published points that a plan must reproduce."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from launcher.config.engines import engine, engine_names
from launcher.config.hardware import shipped_hardware
from launcher.config.inference_constants import inference_entries
from launcher.config.schema import HardwareConfig
from launcher.cost.inference import SERVING_DTYPE, HostCosts, InferenceCase, closed, opened, static
from launcher.cost.inference import memory as bytes_of
from launcher.cost.inputs.device import Device
from launcher.cost.inputs.shape import Shape

GPT_175B = Shape(layers=96, hidden=12288, heads=96, kv_heads=96, head_width=128, ffn=49152, vocab=51200, seq=2048)
LLAMA_8B = Shape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_width=128, ffn=14336, vocab=128256, seq=8192, gated=True, tied=False, biases=False
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


def test_every_constant_is_told_with_its_prior_its_kind_and_its_source() -> None:
    for name, entry in inference_entries().items():
        assert set(entry) == {"value", "default", "spread", "kind", "source"}, name
        assert entry["kind"] in ("fitted", "set") and entry["source"] and entry["default"] > 0
        assert (entry["spread"] is not None) == (entry["kind"] == "fitted"), name
