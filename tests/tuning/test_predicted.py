"""What the cost model says of tuning: states of what is trained alone, four thirds less work, and a layout of its own."""

from __future__ import annotations

import dataclasses

import pytest

from launcher.config import compose, resolve
from launcher.config.schema import Config
from launcher.cost import predict
from launcher.planning.plan import plan
from trainer.shared.run.schema import TuneConfig
from trainer.shared.run.tuning import added_parameters

pytestmark = pytest.mark.slow

LLAMA_70B = "model={family: llama, layers: 80, hidden: 8192, heads: 64, kv_heads: 8, ffn: 28672, vocab: 32000, seq: 4096}"


def tuned(method: str, *words: str) -> Config:
    run = ["run.precision=bf16", "run.global_batch=32", "hardware=h100", "cluster.gpus_per_node=8", "layout.sequence_parallel=true"]
    return resolve(compose([LLAMA_70B, *run, f"tune.method={method}", "tune.targets=[qkv]", *words]))


def test_states_of_lora_are_those_of_what_it_trains() -> None:
    config = tuned("lora", "layout.tensor=8")
    found = predict(config.model, config.layout, config.run, config.cluster, tune=config.tune)
    share = added_parameters(config.model, config.tune) / 8  # type: ignore[arg-type]
    assert found.memory["optimizer states"] == pytest.approx(12 * share, rel=0.1)
    assert found.memory["gradients"] < 1e9


def test_lora_of_70b_fits_eight_h100_where_full_tuning_does_not() -> None:
    full, lora = tuned("full", "layout.tensor=8"), tuned("lora", "layout.tensor=8")
    chances = [predict(c.model, c.layout, c.run, c.cluster, tune=c.tune).fits for c in (full, lora)]
    assert chances[0] < 0.01 and chances[1] > 0.5


def test_a_plan_of_lora_is_another_than_that_of_full_tuning() -> None:
    """Less memory asks for less model parallelism: that is where a search of its own earns."""
    words = ["model.layers=32", "model.hidden=4096", "model.heads=32", "model.ffn=14336"]
    fastest = []
    for method in ("full", "lora"):
        found = plan(tuned(method, *words))
        layout = found.layout(int(found.order[0]))
        fastest.append((layout.tensor * layout.pipeline, float(found.seconds[found.order[0]])))
    assert fastest[1][0] <= fastest[0][0] and 0.55 < fastest[1][1] / fastest[0][1] < 0.85


def test_a_prediction_without_a_tuning_is_that_of_full_tuning() -> None:
    config = tuned("full", "layout.tensor=8")
    plain = predict(config.model, config.layout, config.run, config.cluster)
    assert plain == predict(config.model, config.layout, config.run, config.cluster, tune=dataclasses.replace(TuneConfig(), rank=1))
