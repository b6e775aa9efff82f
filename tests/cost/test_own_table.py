"""A sweep that was run here is a table: predicted row by row as its trials were."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.config import compose, resolve
from launcher.config.hardware import hardware_files
from launcher.cost import predict
from launcher.tables.canonical import read, write
from launcher.tables.own import own_row
from launcher.tables.validation import judge

RUNS = (
    ["recipe=gpt3_5b"],
    ["recipe=llama_13b", "layout.recompute=full", "layout.recompute_every=2"],
    ["recipe=bloom_176b", "layout.stage_layers=null", "layout.balance=cost"],
    ["recipe=gpt3_1.3b", "model.attention=unfused", "run.compile=false", "run.bucket_mb=5"],
    ["recipe=gpt3_1.3b", "run.moments=bf16"],
    ["recipe=gpt3_5b", "layout.tensor=2", "layout.sequence_parallel=true", "run.async_tensor=true"],
    ["recipe=llama_7b_lora", "tune.targets=[qkv,down]", "tune.rank=8"],
    ["recipe=gpt3_1.3b", "model.norm=rms", "model.biases=[qkv]", "model.positions=rotary"],
    ["recipe=t5_3b", "model.encoder_layers=20", "model.decoder_seq=200", "model.activation=gelu"],
)


def test_a_row_of_our_own_is_predicted_as_its_trial_was(tmp_path: Path) -> None:
    configs = [resolve(compose(words)) for words in RUNS]
    hardware = hardware_files()
    measured = {"step_time_s": 1.0, "peak_memory_gb": None, "oom": False}
    write(tmp_path / "mine.csv", [own_row("mine", c.train_config(), c.cluster, hardware, measured) for c in configs])
    judged = judge(read(tmp_path / "mine.csv"), hardware)
    assert [j.reason for j in judged] == [""] * len(RUNS)
    for j, config in zip(judged, configs, strict=True):
        expected = predict(config.model, config.layout, config.run, config.cluster, tune=config.tune)
        assert j.prediction is not None and j.step_seconds == 1.0
        assert (j.prediction.step_time_s, j.prediction.memory_bytes) == pytest.approx((expected.step_time_s, expected.memory_bytes))


@pytest.mark.parametrize(("factor", "inside"), [(0.999, True), (1.001, False)])
def test_coverage_counts_the_intervals_that_a_plan_shows(factor: float, inside: bool, tmp_path: Path) -> None:
    """Also far from all known runs, where they are wider."""
    words = (["recipe=gpt3_5b"], ["model=gpt_tiny", "hardware=cpu"], ["recipe=gpt3_5b", "model.seq=65536"])
    configs, hardware = [resolve(compose(each)) for each in words], hardware_files()
    ends = [predict(c.model, c.layout, c.run, c.cluster).interval_s[1] * factor for c in configs]
    measured = [{"step_time_s": end, "peak_memory_gb": None, "oom": False} for end in ends]
    rows = [own_row("mine", c.train_config(), c.cluster, hardware, each) for c, each in zip(configs, measured, strict=True)]
    write(tmp_path / "mine.csv", rows)
    assert [j.inside for j in judge(read(tmp_path / "mine.csv"), hardware)] == [inside] * len(words)
