"""JSON lines are read as documents whatever their file is called; one JSON document over several lines is text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.shared.corpora.sources import open_source
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import DataConfig

ROWS = [{"text": f"Köln {number}", "url": "x"} for number in range(3)]


def documents(path: Path, content: str) -> list[str]:
    path.write_text(content)
    return [text for _, texts in open_source(DataConfig(source=str(path))).documents() for text in texts]


@pytest.mark.parametrize("name", ["c.jsonl", "c.JSONL", "c.ndjson", "c.json", "c.Json"])
def test_each_line_is_a_document(name: str, tmp_path: Path) -> None:
    assert documents(tmp_path / name, "".join(json.dumps(row) + "\n" for row in ROWS)) == [row["text"] for row in ROWS]


@pytest.mark.parametrize(
    ("name", "content"), [("c.json", json.dumps(ROWS, indent=1)), ("c.json", "[1, 2]\n"), ("c.txt", '{"text": "a"}\n'), ("c.json", "")]
)
def test_a_file_without_such_lines_is_one_text(name: str, content: str, tmp_path: Path) -> None:
    assert documents(tmp_path / name, content) == [content]


def test_one_line_of_json_without_the_field_is_refused_not_trained_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 1 has no text in field 'text'"):
        documents(tmp_path / "c.json", '{"a": "b"}\n')
