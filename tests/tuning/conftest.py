"""Fixtures of the tests of tuning."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tuning.examples import EXAMPLES

from trainer.data.prepare import prepare
from trainer.shared.run.schema import DataConfig


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("instructions")
    (folder / "text.txt").write_text(" ".join(json.dumps(example) for example in EXAMPLES))
    prepare(DataConfig(source=str(folder / "text.txt"), path=str(folder / "corpus"), vocab=300))
    (folder / "examples.jsonl").write_text("\n".join(json.dumps(example) for example in EXAMPLES))
    template = "{context}\nQuestion: {question}\nAnswer: {answer}"
    source = str(folder / "examples.jsonl")
    return {"kind": "instructions", "source": source, "path": str(folder / "corpus"), "template": template, "truncate": "context"}
