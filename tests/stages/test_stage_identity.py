"""What makes a stage the same stage: what it does, and what it takes; not where it lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.stages.graph import parse
from launcher.stages.plan import plan


def ids(base: dict[str, Any] | None = None, own: Path | None = None, **data: Any) -> dict[str, str]:
    keys = {"model.vocab": 400, "model.seq": 16, "cluster.gpus_per_node": 1} | (base or {})
    stages = {
        "data": {"stage": "prepare", "data.source": "text.txt", "data.vocab": 300} | data,
        "base": {"stage": "train", "inputs": {"data": "data"}} | keys,
        "hf": {"stage": "convert", "inputs": {"model": "base"}},
    }
    return {planned.stage.name: planned.id for planned in plan(parse({"stages": stages}), (), own)}


def test_another_input_makes_another_stage_of_all_that_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some words to learn " * 100)
    one, other = ids(), ids(**{"data.vocab": 290})
    assert ids() == one and not set(one.values()) & set(other.values())


def test_the_corpus_that_a_group_of_keys_names_makes_no_other_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage reads the one that it is given."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some words to learn " * 100)
    Path("conf/data").mkdir(parents=True)
    Path("conf/data/mine.yaml").write_text("kind: corpus\npath: /elsewhere\nsource: mine.txt\n")
    assert ids({"data": "mine"}, Path("conf")) == ids()
    assert ids({"model.seq": 8})["base"] != ids()["base"]
