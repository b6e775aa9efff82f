"""Rows of tables that nobody has seen before: their words are understood, and their steps predicted.

``data/dlperf.csv`` has what Oneflow-Inc/DLPerf measured in 2021 with Megatron-LM and OneFlow on four nodes of eight V100 that share one 100 Gb/s port each.
No constant was fitted to it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.config.trainers import profile
from launcher.cost import predict
from launcher.tables.published import Row, read
from launcher.tables.publishers import publisher
from launcher.tables.questions import layout_of
from launcher.tables.validation import by_source, judge
from tests.cost.machines import HARDWARE, cluster, layout, mixed
from trainer.config import ModelConfig
from trainer.config.schema import RECOMPUTE, SCHEDULES

TABLE = Path(__file__).parent / "data" / "dlperf.csv"
CELLS = {"gpus": "16", "tp": "1", "pp": "2", "mbs": "1", "gbs": "64"}


@pytest.mark.parametrize(("source", "median"), [("DLPerf, Megatron-LM", 0.13), ("DLPerf, OneFlow", 0.23)])
def test_a_source_that_nobody_fitted_is_predicted(source: str, median: float) -> None:
    found = next(each for name, each in by_source(judge(read(TABLE), HARDWARE)).items() if name.startswith(source))
    assert found.time is not None and found.time.count == 16 and found.time.median < median


def test_tensor_parallelism_across_nodes_waits_for_the_port_they_share() -> None:
    """Several times what it would take with a port for each device."""
    rows = [j for j in judge(read(TABLE), HARDWARE) if j.row.whole("tp") in (16, 32)]
    assert len(rows) == 4
    for j in rows:
        assert j.answer is not None and j.answer.step_time_s == pytest.approx(j.step_seconds, rel=0.25)


def test_our_own_runs_are_predicted_by_validate_as_by_plan() -> None:
    # fmt: off
    row = Row(1, {
        "model": "7B", "arch": "gpt", "layers": "32", "hidden": "4096", "heads": "32", "vocab": "50304", "seq": "2048", "gpu": "a100_80", "gpus": "64", "nodes": "8",
        "tp": "2", "pp": "1", "mbs": "1", "gbs": "256", "recompute": "none", "zero_stage_or_sharding": "ZeRO-1", "precision": "bf16",
    })
    # fmt: on
    model = ModelConfig(layers=32, hidden=4096, heads=32, vocab=50304, seq=2048)
    planned = predict(model, layout(2, 1, 32), mixed(256), cluster(64))
    answer = judge([row], HARDWARE)[0].answer
    assert answer is not None
    assert answer.step_time_s == pytest.approx(planned.step_time_s) and answer.memory_bytes == pytest.approx(planned.memory_bytes)


@pytest.mark.parametrize(
    ("words", "sharded"),
    [
        ("none", (1, 1, 1)), ("ZeRO-1", (1, 1, 8)), ("zero 2", (1, 8, 8)), ("ZeRO stage 3", (8, 8, 8)), ("Zero3", (8, 8, 8)), ("FSDP 4", (4, 4, 4)),
        ("FULL_SHARD", (8, 8, 8)), ("SHARD_GRAD_OP", (1, 8, 8)), ("distributed optimizer", (1, 1, 8)), ("AMSP P1 G2 OS8", (1, 2, 8)), ("ZeRO-0", (1, 1, 1)),
        ("MiCS", (8, 8, 8)), ("ZeRO-3 (MiCS) 4", (4, 4, 4)), ("HSDP 2", (2, 2, 2)), ("FSDP2 4 + DP", (4, 4, 4)), ("ZeRO-1 over 2", (1, 1, 2)),
    ],
)  # fmt: skip
def test_words_of_sharding(words: str, sharded: tuple[int, int, int]) -> None:
    row = Row(1, {**CELLS, "source": "somebody", "zero_stage_or_sharding": words})
    layout, _ = layout_of(row, publisher(row))
    assert (layout["params"], layout["grads"], layout["optimizer"]) == sharded


@pytest.mark.parametrize(
    ("words", "kind", "layers", "every"),
    [
        ("none", "none", -1, 1), ("full", "full", -1, 1), ("full (uniform)", "full", -1, 1), ("activation checkpointing", "full", -1, 1), ("no", "none", -1, 1),
        ("selective (per-op)", "selective", -1, 1), ("4 layers", "full", 4, 1), ("4 of 32 layers", "full", 4, 1), ("every 2nd layer", "full", -1, 2),
    ],
)  # fmt: skip
def test_words_of_recomputation(words: str, kind: str, layers: int, every: int) -> None:
    row = Row(1, {**CELLS, "source": "somebody", "recompute": words})
    layout, _ = layout_of(row, publisher(row))
    assert (RECOMPUTE[layout["recompute"]], layout["recompute_layers"], layout["recompute_every"]) == (kind, layers, every)


@pytest.mark.parametrize(
    ("cells", "schedule"),
    [
        ({}, "1f1b"), ({"notes": "schedule ZB-2p"}, "zero_bubble"), ({"notes": "zero bubble, against 1F1B"}, "zero_bubble"), ({"model": "7B GPipe"}, "gpipe"),
        ({"notes": "1F1B, against ZB-1p"}, "1f1b"), ({"notes": "ZB-H1", "pp": "1", "tp": "2"}, "1f1b"), ({"notes": "ZB-V", "virtual_pp": "2"}, "interleaved"),
    ],
)  # fmt: skip
def test_words_of_schedules(cells: dict[str, str], schedule: str) -> None:
    row = Row(1, {**CELLS, "source": "Zero Bubble", **cells})
    layout, _ = layout_of(row, publisher(row))
    assert SCHEDULES[layout["schedule"]] == schedule


def test_zb_2p_is_faster_than_zb_1p_and_holds_twice_the_micro_batches() -> None:
    # fmt: off
    cells = {
        **CELLS, "source": "Zero Bubble", "gpu": "A100-80GB", "pp": "8", "gpus": "8", "layers": "24", "hidden": "2048", "seq": "2048", "model": "1B", "gbs": "16",
    }
    # fmt: on
    one, two = (judge([Row(1, {**cells, "notes": name})], HARDWARE)[0].answer for name in ("ZB-1p", "ZB-2p"))
    assert one is not None and two is not None
    assert 0.8 * one.step_time_s < two.step_time_s < 0.95 * one.step_time_s
    assert 1.3 * one.reported_bytes < two.reported_bytes < 2 * one.reported_bytes


@pytest.mark.parametrize(
    ("source", "year", "trainer", "attention"),
    [
        ("Megatron-LM on our cluster", "2021", "Megatron-LM 2021", "fused_softmax"), ("Megatron-LM on our cluster", "2023", "Megatron-LM 2023", "flash2"),
        ("Megatron-LM on our cluster", "", "Megatron Core", "flash2"), ("Megatron-DeepSpeed, a thesis", "2023", "Megatron-DeepSpeed", "fused_softmax"),
        ("somebody", "2021", "unknown, before 2023", "fused_softmax"), ("somebody", "2024", "unknown", "flash2"), ("", "", "trireme", "flash2"),
    ],
)  # fmt: skip
def test_a_source_that_nobody_knows_had_the_trainers_of_its_time(source: str, year: str, trainer: str, attention: str) -> None:
    found = profile(publisher(Row(1, {"source": source, "year": year})).trainer)
    assert (found.name, found.kernels.attention) == (trainer, attention)
