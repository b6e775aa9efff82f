"""A trainer is a file: those that ship and a user's own work the same wherever a trainer can be named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.cli import main as tool
from launcher.config import compose
from launcher.config.trainers import changed, profile, profile_names
from launcher.tables.canonical import read, write
from trainer.shared.run.errors import ConfigError

pytestmark = pytest.mark.slow

PLAN = ["recipe=llama_13b", "layout.tensor=2", "search.space.max_pipeline=2", "search.space.sharding=levels", "--json"]
TABLE = Path(__file__).parent.parent / "search" / "layouts_13b.csv"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = tmp_path / "my conf" / "trainer"
    folder.mkdir(parents=True)
    (folder / "ours.yaml").write_text(
        "# A fork.\ndefaults: [megatron_core, _self_]\nname: ours\noverlap: {tensor: none}\nnumbers: {gradient_bytes: 2}\n"
    )
    return folder.parent


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.campaign("words")] * bool(i % 3)) for i, name in enumerate(profile_names())]
)
def test_a_profile_is_the_same_for_tables_and_for_runs(name: str) -> None:
    assert compose([f"trainer={name}"]).trainer == profile(name)


def test_without_a_word_the_trainer_is_our_own_and_the_only_one_that_is_launched() -> None:
    assert compose([]).trainer == profile("trireme")
    assert [name for name in profile_names() if profile(name).embedded] == ["trireme"]


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, float]:
    assert tool.main(["plan", *PLAN, *words]) == 0
    return {one["name"]: one["memory_bytes"] for one in json.loads(capsys.readouterr().out)["layouts"]}


def test_a_trainer_of_ones_own_is_one_file_and_plans(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    its, base = planned(capsys, "--config-dir", str(own), "trainer=ours"), planned(capsys, "trainer=megatron_core")
    both = its.keys() & base.keys()
    assert both and all(its[name] < base[name] for name in both), "gradients of 2 bytes instead of 4"


def test_a_trainer_of_ones_own_sizes_searches_tables_and_validates(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, table = ["--config-dir", str(own), "trainer=ours", "--json"], str(own / "few.csv")
    write(table, [row.cells for row in read(TABLE) if row["seq"] == 2048 and row["gpus"] == 64][::3])
    assert tool.main(["size", "--gpus", "8", "--days", "10", "--tokens", "20e9", "hardware=h100", *mine]) == 0
    assert tool.main(["search", "--replay", table, *mine]) == 0
    capsys.readouterr()
    errors = []
    for words in (mine, ["--json"]):
        assert tool.main(["validate", table, *words]) == 0
        errors.append(json.loads(capsys.readouterr().out)["all"]["time"]["median"])
    assert errors[0] > errors[1], "the trainer that measured them describes them better"


def test_a_trainer_that_cannot_be_launched_is_one_plain_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["train", "trainer=pax", "data=synthetic", f"sweep.dir={tmp_path}"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: trainer.name=Pax can be predicted") and printed.count("\n") == 1
    assert tool.main(["search", "trainer=pax", "data=synthetic", f"sweep.dir={tmp_path}"]) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("overlap.tensr", "all", r"unknown key trainer\.overlap\.tensr; did you mean 'tensor'"),
        ("overlap.tensor", "some", r"trainer\.overlap\.tensor='some' is not one of none, backward or all"),
        ("numbers.gradient_bytes", -2, r"trainer\.numbers\.gradient_bytes=-2.* is below the smallest allowed value"),
    ],
)
def test_a_wrong_fact_is_a_plain_error(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changed(profile("trireme"), {key: value})


@pytest.mark.parametrize("text", ["[ours, _self_]", "[theirs, _self_]", "ours", "[{trainer: ours}]", "[nowhere, _self_]"])
def test_a_profile_whose_base_is_none_is_a_plain_error(text: str, own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own / "trainer" / "ours.yaml").write_text(f"defaults: {text}\nname: ours\n")
    (own / "trainer" / "theirs.yaml").write_text("defaults: [ours, _self_]\nname: theirs\n")
    for verb in (["trainers"], ["plan", "trainer=ours"]):
        assert tool.main([*verb, "--config-dir", str(own)]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1 and "recursion" not in said


@pytest.mark.parametrize("words", [["trainer=megatron_cor"], ["--config-dir", "nowhere", "trainer=trireme"]])
def test_a_profile_or_folder_that_does_not_exist_is_a_plain_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["plan", *words]) == 2
    assert capsys.readouterr().err.startswith("error: ")
