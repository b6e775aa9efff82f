"""What makes a stage the same stage: what it does, and what it takes; not where it lies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from launcher.stages.graph import parse, read_pipeline
from launcher.stages.plan import plan

OTHERS: dict[str, Any] = {
    "data": {"stage": "prepare", "data.source": "text.txt", "data.vocab": 300},
    "base": {
        "stage": "train", "inputs": {"data": "data"}, "model.vocab": 300, "model.seq": 16, "cluster.gpus_per_node": 1,
        "over": {"layout.micro_batch": [1, 2]}, "best": "loss",
    },
    "file": {"stage": "convert", "inputs": {"model": "base"}, "format": "gguf", "dtype": "q8_0"},
    "again": {"stage": "convert", "inputs": {"model": "file"}, "format": "checkpoint"},
    "fetched": {"stage": "prepare", "tasks": ["piqa"]},
    "asked": {"stage": "evaluate", "inputs": {"model": "again", "tasks": "fetched"}, "tasks": ["piqa", "prose"], "limit": 3},
    "more": {"stage": "evaluate", "inputs": {"model": "base"}, "tasks": ["prose"], "layout.tensor": 2},
    "text": {"stage": "generate", "inputs": {"model": "base"}, "prompts": ["a"], "tokens": 4, "temperature": 0.5, "run.precision": "bf16"},
}  # fmt: skip
"""Stages that no shipped pipeline has."""
IDS = {
    "gpt_tiny": {
        "base": "89060eae8c61", "data": "627087a61d61", "hf": "d036bce1366e", "score": "5f9986202d21", "text": "ad97b2d11fe4",
    },
    "tune_tiny": {
        "after": "00e8bf085fba", "answer": "a4d430c02878", "base": "cac0eccd8849", "before": "2f0ac2cdc7eb", "data": "a1f2292d80ed", "hf": "12263650a9b5", "tuned": "ac160ca4781a",
    },
    "others": {
        "again": "1a8d92dbf05a", "asked": "04a5c6b069dd", "base": "752e0d8907b7", "base-1": "4dda5a95b2fd", "base-2": "d1682e3b758b", "data": "4d1711e5be68", "fetched": "3adb4d7edebf", "file": "48134824e88c", "more": "9a381d7a51c6", "text": "0c04f4a935c8",
    },
}  # fmt: skip


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


def pinned(name: str, **changes: Any) -> dict[str, str]:
    return {item.stage.name: item.id for item in plan(read_pipeline(name, changes), ())}


def test_the_stages_of_earlier_versions_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An id that changes has a user's model trained once more."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some text to learn from\n" * 400)
    Path("examples.jsonl").write_text('{"context": "c", "question": "a", "answer": "b"}\n' * 200)
    for path in (Path("text.txt"), Path("examples.jsonl")):
        os.utime(path, ns=(10**18, 10**18))
    text, examples = {"data.data.source": "text.txt"}, {f"{name}.data.source": "examples.jsonl" for name in ("tuned", "before", "after")}
    tiny = pinned("gpt_tiny", **text)
    tuned = pinned("tune_tiny", **text, **examples, **{"data.data.pattern": "*.txt"})
    others = {planned.stage.name: planned.id for planned in plan(parse({"stages": OTHERS}), ())}
    assert {"gpt_tiny": tiny, "tune_tiny": tuned, "others": others} == IDS
