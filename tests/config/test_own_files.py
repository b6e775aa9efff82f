"""A file of the user's own is used, or it is said that another one of that name would be."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.config import compose
from launcher.config.trainers import profile
from trainer.shared.run.errors import ConfigError

SHIPPED = {"hardware": "h100", "trainer": "nemo", "model": "gpt_tiny", "recipe": "gpt3_20b", "cluster": "slurm", "layout": "zero1",
           "data": "synthetic", "optimizer": "adamw", "search": "quick", "engine": "vllm", "workload": "chat"}  # fmt: skip


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of config groups, in each of which a file has the name of a shipped one."""
    monkeypatch.chdir(tmp_path)
    for group, name in SHIPPED.items():
        path = Path("own", group, f"{name}.yaml")
        path.parent.mkdir(parents=True)
        path.write_text("{}\n")
    return Path("own")


@pytest.mark.parametrize("group", SHIPPED)
def test_a_file_of_ones_own_with_a_shipped_name_is_refused(group: str, own: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([f"{group}={SHIPPED[group]}"], own)
    path = own / group / f"{SHIPPED[group]}.yaml"
    assert str(caught.value).startswith(f"{path} has the name of a file that ships with Trireme, and {group}={SHIPPED[group]} would")


def test_it_stops_nobody_who_does_not_ask_for_it(own: Path) -> None:
    assert compose(["hardware=a100_80"], own).cluster.hardware.name == "A100-80GB-SXM"


def test_a_trainer_that_builds_on_it_is_refused_too(own: Path) -> None:
    (own / "trainer" / "ours.yaml").write_text("defaults: [nemo, _self_]\nname: ours\n")
    words = r"own/trainer/nemo\.yaml has the name of a file that ships"
    with pytest.raises(ConfigError, match=words):
        profile("ours", own)
    with pytest.raises(ConfigError, match=words):
        compose(["trainer=ours"], own)


def test_a_file_that_another_one_of_this_folder_hides_is_refused(own: Path) -> None:
    for folder, words in ((own, "mine"), (Path("runs"), "measured")):
        (folder / "hardware").mkdir(parents=True, exist_ok=True)
        (folder / "hardware" / "desk.yaml").write_text(f"# @package cluster.hardware\nname: {words}\n")
    with pytest.raises(ConfigError, match=r"own/hardware/desk\.yaml has the name of runs/hardware/desk\.yaml"):
        compose(["hardware=desk"], own)
    assert compose(["hardware=desk"], Path("runs")).cluster.hardware.name == "measured"


@pytest.mark.parametrize(
    ("group", "text", "words"),
    [
        ("trainer", "", "own/trainer/ours.yaml is empty; say what it builds on"),
        ("trainer", "defaults: [nope, _self_]\nname: ours\n", "trainer=nope does not exist"),
        ("hardware", "- name\n", "own/hardware/ours.yaml, which is not a mapping of keys to values"),
    ],
)
def test_a_file_that_says_nothing_is_one_plain_error(group: str, text: str, words: str, own: Path) -> None:
    (own / group / "ours.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose([f"{group}=ours"], own)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_train_refuses_it_before_anything_is_started(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config-dir", "own", "model=gpt_tiny", "data=stdlib"]) == 2
    assert "own/model/gpt_tiny.yaml has the name of a file that ships" in capsys.readouterr().err
