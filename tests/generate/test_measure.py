"""An inference is measured as it was asked for: batches that begin together, a closed loop, random arrivals; under any layout."""

from __future__ import annotations

from typing import Any

import pytest

from tests.farm import Farm, Finished
from trainer.generate.cache import COLUMNS
from trainer.shared.records.trial_files import PERCENTILES, read_steps

STEPS, WARMUP, OUTPUT = 4, 1, 6


def measured(farm: Farm, requests: dict[str, Any], **layout: int) -> Finished:
    ranks = {"tensor": 1, "pipeline": 1, "data": 1} | layout
    run = {"task": "inference", "steps": STEPS, "warmup_steps": WARMUP, "global_batch": ranks["data"]}
    model = {"layers": 2, "hidden": 16, "heads": 2, "vocab": 64, "seq": 32}
    config = {"model": model, "layout": ranks, "data": {"kind": "synthetic"}, "run": run}
    config["requests"] = {"input": 5, "output": OUTPUT, "batch": 2} | requests
    return farm.train(config, ranks["tensor"] * ranks["pipeline"] * ranks["data"])


@pytest.mark.parametrize("requests", [{"mode": "static"}, {"mode": "closed", "batch": 3}, {"mode": "open", "rate": 300.0}])
def test_percentiles_are_those_of_the_requests_after_the_warm_up(farm: Farm, requests: dict[str, Any]) -> None:
    finished = measured(farm, requests).checked()
    result, lines = finished.result, read_steps(finished.directory)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)) and len(result["step_times_s"]) == STEPS
    for name in PERCENTILES:
        assert 0 < result[name]["p50"] <= result[name]["p90"] <= result[name]["p99"]
    assert all(line["latency_s"] == pytest.approx(line["ttft_s"] + (OUTPUT - 1) * line["tpot_s"]) for line in lines)
    assert result["tokens_per_s"] > 0


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}, {"data": 2}])
def test_keys_and_values_are_counted_on_every_layout(farm: Farm, layout: dict[str, int]) -> None:
    """Two requests of a replica: 4 bytes x keys and values x what a rank has of 2 blocks x 16 x the columns for 5 + 6 - 1 tokens read."""
    whole = 2 * 4 * 2 * 2 * 16 * COLUMNS
    result = measured(farm, {"mode": "static"}, **layout).checked().result
    shared = layout.get("tensor", 1) * layout.get("pipeline", 1)
    assert result["memory"]["keys and values"] == whole / shared
    assert result["peak_memory_bytes"] == sum(result["memory"].values())


def test_a_request_that_is_too_long_is_one_plain_line(farm: Farm) -> None:
    finished = measured(farm, {"input": 30})
    assert finished.codes == {0: 2} and "do not fit into model.seq=32" in finished.failure(0)["message"]
