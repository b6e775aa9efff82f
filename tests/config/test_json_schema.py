"""The JSON schema that editors get says what the strict reader says."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from launcher.cli.keys import key_docs
from launcher.cli.main import main
from launcher.config import conf_dir
from launcher.config.json_schema import json_schema
from trainer.shared.run.errors import ConfigError

SECTIONS = ("model", "layout", "data", "optimizer", "cluster", "hardware", "trainer", "search")
FILES = sorted(path for folder in (*SECTIONS, "recipe") for path in (conf_dir() / folder).glob("*.yaml"))


@cache
def validator(section: str | None) -> Draft202012Validator:
    schema = json_schema(section)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def errors(section: str | None, value: object) -> list[str]:
    return [error.message for error in validator(section).iter_errors(value)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_shipped_file_obeys_the_schema(path: Path) -> None:
    section = None if path.parent.name == "recipe" else path.parent.name
    assert errors(section, yaml.safe_load(path.read_text()) or {}) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"layot": {"tensor": 2}}, {"layout": {"tensr": 2}}, {"layout": {"tensor": 0}}, {"layout": {"tensor": "two"}},
        {"model": {"family": "gpt5"}}, {"cluster": {"nodes": -1}}, {"run": {"precision": 16}}, {"layout": {"sharding": {"params": 0.5}}},
    ],
    ids=str,
)  # fmt: skip
def test_what_the_reader_refuses_the_schema_refuses(wrong: dict[str, object]) -> None:
    assert errors(None, wrong) != []


def test_an_interpolation_may_stand_for_any_value() -> None:
    assert errors(None, {"layout": {"tensor": "${cluster.gpus_per_node}"}}) == []


def test_every_key_is_in_the_schema_with_its_documentation() -> None:
    """Values are taken apart key by key: the description that an editor shows is the one that ``--keys`` prints."""
    schema = json_schema()
    for key, (_, doc) in key_docs().items():
        *sections, name = key.split(".")
        nodes = [schema]
        for section in sections:
            below = [node["properties"][section] for node in nodes if section in node.get("properties", {})]
            nodes = [choice for node in below for choice in (node.get("anyOf") or [node])]
        docs = [node["properties"][name]["description"] for node in nodes if name in node.get("properties", {})]
        assert any(doc.startswith(found) for found in docs), key


def test_the_command_prints_the_schema_of_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--schema", "layout"]) == 0
    assert json.loads(capsys.readouterr().out) == copy.deepcopy(json_schema("layout"))
    assert main(["train", "--schema", "layot"]) == 2
    assert "did you mean 'layout'" in capsys.readouterr().err


def test_an_unknown_section_is_a_plain_error() -> None:
    with pytest.raises(ConfigError, match="--schema dry_run names no section"):
        json_schema("dry_run")
