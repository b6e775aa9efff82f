"""Memory by part: the formulas of the papers, the schedules' micro-batches in flight, shards, margins."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.trainers import changed, profile
from launcher.cost import CostModel, predict
from launcher.cost.inputs.case import Case
from launcher.cost.inputs.layouts import to_table
from launcher.cost.memory import activations
from launcher.cost.memory import peak as memory
from tests.cost.machines import GPT3, GPT_1T, GPT_22B, GPT_530B, HARDWARE, cluster, layout, mixed
from trainer.shared.parallel.schedule import build, in_flight
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import ModelConfig, ShardingConfig

PAPER = (GPT_22B, GPT3, GPT_530B, GPT_1T)


def case(model: ModelConfig, sequence: bool, recompute: str, tensor: int = 8, micro_batch: int = 1) -> Case:
    table = to_table([layout(tensor, sequence_parallel=sequence, recompute=recompute, micro_batch=micro_batch)])
    return CostModel(cluster(8), profile("megatron_lm_2022")).case(model, table, mixed(micro_batch, "fp16"))


@pytest.mark.parametrize("model", PAPER)
def test_a_block_keeps_what_korthikanti_derives(model: ModelConfig) -> None:
    """Table 2: s b h (10 + 24/t + 5 a s / h t), with sequence parallelism s b h / t (34 + 5 a s / h), with selection 34 s b h / t."""
    s, h, a, t = model.seq, model.hidden, model.heads, 8
    kept = [
        float(activations.block(case(model, *how)).chosen[0])
        for how in ((False, "none"), (True, "none"), (True, "selective"), (False, "full"))
    ]
    formulas = [s * h * (10 + 24 / t + 5 * a * s / (h * t)), s * h / t * (34 + 5 * a * s / h), s * h / t * 34, s * h * 2]
    assert kept == pytest.approx(formulas, rel=0.01)


@pytest.mark.parametrize("model", PAPER)
def test_sequence_parallelism_and_selection_save_five_times_the_activations(model: ModelConfig) -> None:
    plain, saved = (float(activations.block(case(model, *how)).chosen[0]) for how in ((False, "none"), (True, "selective")))
    assert 4.8 < plain / saved < 6.3


@given(
    p=st.integers(1, 6),
    v=st.integers(1, 3),
    groups=st.integers(1, 4),
    rest=st.integers(0, 5),
    schedule=st.sampled_from(["1f1b", "gpipe", "zero_bubble"]),
)
def test_micro_batches_in_flight_are_those_of_the_schedule(p: int, v: int, groups: int, rest: int, schedule: str) -> None:
    m = p * groups if v > 1 else groups + rest
    if v > 1:
        if p == 1:
            return
        schedule = "interleaved"
    table = to_table([layout(1, p, 1, virtual_pipeline=v, schedule=schedule)])
    asked = CostModel(cluster(8), profile("megatron_lm_2022")).case(ModelConfig(layers=p * v), table, mixed(m))
    ranks = [in_flight(actions) for actions in build(schedule, p, v, m)]
    for kind, rank in (("first", 0), ("middle", min(1, p - 1)), ("last", p - 1)):
        if kind != "middle" or p > 2:
            assert float(memory.in_flight(asked, kind)[0]) == pytest.approx(ranks[rank] / v)


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize(("sharding", "bytes_per_parameter"), [((1, 1, 1), 18), ((1, 1, 64), 6 + 12 / 64), ((64, 64, 64), 18 / 64)])
def test_states_take_the_bytes_of_their_shards(sharding: tuple[int, int, int], bytes_per_parameter: float, context: int) -> None:
    """Rajbhandari et al. 2020 (ZeRO), figure 1, with 4-byte gradients."""
    model = ModelConfig(layers=32, hidden=4096, heads=32, vocab=50000, seq=2048)
    table = to_table([layout(data=64 // context, context=context, sharding=ShardingConfig(*sharding))])
    asked = CostModel(cluster(64), profile("megatron_lm_2023")).case(model, table, mixed(64))
    asked = dataclasses.replace(asked, trainer=changed(asked.trainer, {"numbers.gradient_bytes": 4}))
    parts = memory.states(asked, asked.shape.parameters, 0.0)
    assert sum(float(np.squeeze(size)) for size in parts.values()) == pytest.approx(bytes_per_parameter * asked.shape.parameters)


@pytest.mark.parametrize(("trainer", "precision", "each"), [
    ("megatron_lm_2023", "bf16", 4), ("megatron_lm_2023", "fp16", 2), ("megatron_lm_2021", "fp8", 4), ("megatron_deepspeed", "bf16", 2),
    ("nemo_2022", "fp16", 4), ("trireme", "bf16", 4),
])  # fmt: skip
def test_megatron_keeps_and_sums_gradients_in_four_bytes_unless_the_run_is_in_fp16(trainer: str, precision: str, each: int) -> None:
    model = ModelConfig(layers=32, hidden=4096, heads=32, vocab=50000, seq=2048)
    asked = CostModel(cluster(64), profile(trainer)).case(model, to_table([layout(data=64)]), mixed(64, precision))
    kept = float(np.squeeze(memory.states(asked, asked.shape.parameters, 0.0)[memory.GRADIENTS]))
    assert kept == pytest.approx(each * asked.shape.parameters) and (asked.reduce_bytes == each or trainer == "nemo_2022")


def test_every_byte_has_a_part() -> None:
    found = predict(GPT3, layout(8, 8, 16, sequence_parallel=True), mixed(1536), cluster(1024))
    assert found.memory_bytes == pytest.approx(sum(found.memory.values()))
    assert all(size >= 0 for size in found.memory.values())
    assert sum(found.counted.values()) < found.memory_bytes


def test_what_fits_is_a_probability_that_falls_with_need() -> None:
    tables = [layout(8, 8, 1, micro_batch=b, sequence_parallel=True, recompute="selective") for b in (1, 2, 3, 4, 5, 6)]
    chances = [predict(GPT3, one, mixed(60), cluster(64)).fits for one in tables]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > 0.99 and chances[-1] < 0.01


def test_a_memory_budget_counts_what_the_trainer_counts() -> None:
    model, run = ModelConfig(), mixed(1)
    need = sum(predict(model, layout(), run, cluster(1, "cpu")).counted.values())
    tight, roomy = (
        predict(model, layout(), dataclasses.replace(run, memory_gb=need * f / 1e9), cluster(1, "cpu")).fits for f in (0.8, 1.2)
    )
    assert tight < 0.05 and roomy > 0.95


def test_full_attention_scores_cost_memory_that_a_flash_kernel_does_not() -> None:
    model = ModelConfig(family="llama", layers=32, hidden=4096, heads=32, seq=4096, ffn=11008)
    written, flash = (
        predict(dataclasses.replace(model, attention=a), layout(), mixed(1), cluster(1)).memory["activations"] for a in ("unfused", "fused")
    )
    assert written - flash > 32 * 32 * 4096**2 * 2 * 0.9


@given(tensor=st.sampled_from([1, 2, 8, 16]), pipeline=st.sampled_from([1, 2]), replicas=st.sampled_from([1, 4]), batches=st.integers(1, 3))
def test_what_the_device_has_not_summed_yet_stays_where_the_host_runs_ahead(
    tensor: int, pipeline: int, replicas: int, batches: int
) -> None:
    """PyTorch before 2.8: two whole gradients a block, beside all activations of the next micro-batch; where the host waits for the device in
    between, or there is no next one, beside what backward has left of them, and nothing where that is less."""
    model = ModelConfig(family="llama", layers=32, hidden=4096, heads=32, ffn=14336, vocab=32000, seq=4096)
    asked = layout(tensor, pipeline, replicas, micro_batch=2, sequence_parallel=tensor > 1)
    delayed, prompt = (
        predict(
            model,
            asked,
            mixed(2 * replicas * batches),
            cluster(tensor * pipeline * replicas, "h100"),
            changed(profile("nanotron"), {"memory.late_frees": late}),
        )
        for late in (True, False)
    )
    more = delayed.memory[memory.PASSING] - prompt.memory[memory.PASSING]
    whole = 2 * 32 / pipeline * 2 * 4096 * 4096 * 2
    if tensor == 1:
        assert more == 0
    elif pipeline == 1 and batches > 1:
        assert more == pytest.approx(whole)
    else:
        assert 0 <= more < whole and (more > 0) == (tensor == 16)


def test_a_device_without_rates_is_refused_in_plain_words() -> None:
    nothing = dataclasses.replace(HARDWARE["a100_80"], peak_tflops={})
    with pytest.raises(ConfigError, match="has no peak_tflops; choose a file of conf/hardware"):
        predict(GPT3, layout(8, 8, 1), mixed(8), dataclasses.replace(cluster(64), hardware=nothing))
