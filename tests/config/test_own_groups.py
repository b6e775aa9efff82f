"""Groups and standing settings of the user's own, as Hydra's users know them: ``+experiment=fast``, ``--config-name``."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from launcher.cli.main import main
from launcher.config import compose
from trainer.shared.run.errors import ConfigError

FILES = {
    "experiment/fast.yaml": "# @package _global_\ndefaults: [override /model: llama_tiny, override /cluster: slurm]\n"
    "run: {steps: 7}\ncluster: {partition: quick}\n",
    "experiment/slow.yaml": "# @package _global_\nrun: {steps: 70}\n",
    "experiment/deep/er.yaml": "# @package _global_\nmodel: {layers: 24}\n",
    "experiment/lost.yaml": "run: {steps: 7}\n",
    "experiment/odd.yaml": "# @package _global_\ncluster: {time_limit: 4:00:00}\n",
    "run/short.yaml": "steps: 3\n",
    "top.yaml": "defaults: [config, experiment: slow, _self_, override model: llama_tiny]\nrun: {warmup_steps: 1}\n",
    "far.yaml": "defaults: [config, _self_, override model: house]\nhydra: {searchpath: ['file://elsewhere']}\n",
    "alone.yaml": "run: {steps: 9}\n",
}


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in (FILES | {"../elsewhere/model/house.yaml": "layers: 5\n"}).items():
        path = Path("mine", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Path("mine")


def test_a_group_of_ones_own_sets_keys_and_chooses_from_ours(own: Path) -> None:
    config = compose(["+experiment=fast", "cluster.account=me", "run.seed=4"], own)
    assert (config.model.family, config.run.steps, config.run.seed, config.cluster.backend) == ("llama", 7, 4, "slurm")
    assert (config.cluster.partition, config.cluster.account) == ("quick", "me")  # type: ignore[attr-defined]
    assert compose(["+experiment=fast", "run.steps=8"], own).run.steps == 8, "the command line comes last"
    assert compose(["+experiment=fast", "+run=short"], own).run.steps == 3
    assert compose(["+experiment=deep/er"], own).model.layers == compose(["+experiment/deep=er"], own).model.layers == 24


def test_a_group_without_its_folder_is_asked_for_it() -> None:
    with pytest.raises(ConfigError, match=r"^\+experiment=fast: no key or group 'experiment'; .* --config-dir DIR, as DIR/experiment/$"):
        compose(["+experiment=fast"])


def test_a_file_that_is_written_anew_is_read_anew(own: Path) -> None:
    assert compose(["+experiment=slow"], own).run.steps == 70
    (own / "experiment/slow.yaml").write_text("# @package _global_\nrun: {steps: 71}\n")
    assert compose(["+experiment=slow"], own).run.steps == 71


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "experiment=fast",
            "experiment=fast: no file of this group is chosen yet, which this would replace; add one with +experiment=fast",
        ),
        ("+experiment=fats", "experiment=fats does not exist; did you mean 'fast'?; mine/experiment/ has deep/er, fast, lost, odd or slow"),
        ("+experiment=lost", "mine/experiment/lost.yaml does not say where its keys belong; begin it with the line '# @package _global_'"),
        ("+experiment=odd", "mine/experiment/odd.yaml, line 2: YAML reads time_limit: 4:00:00 as the number 14400; write it in quotes"),
        ("+experimnt=fast", "unknown key 'experimnt'; did you mean 'experiment'"),
    ],
)
def test_a_wrong_choice_is_one_plain_line(override: str, words: str, own: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([override], own)
    assert str(caught.value).startswith(words) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--config-dir", "mine", "--config-name", "top"], {"model.family": "llama", "run.steps": 70, "run.warmup_steps": 1}),
        (["-cp", "mine", "-cn=top.yaml", "experiment=fast", "cluster.account=me"], {"run.steps": 7, "cluster.partition": "quick"}),
        (["--config-dir=mine", "--config-name=far"], {"model.layers": 5}),
    ],
    ids=str,
)
def test_a_primary_configuration_of_ones_own_stands_over_ours(
    words: list[str], expected: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words, "--cfg", "job"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    for key, value in expected.items():
        section, name = key.split(".")
        assert shown[section][name] == value


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--config-name", "top"], "--config-name=top needs the folder that holds top.yaml; give it with --config-dir DIR"),
        (
            ["--config-dir", "mine", "--config-name", "tpo"],
            "--config-name=tpo does not exist; did you mean 'top'?; mine has alone, far or top",
        ),
        (
            ["--config-dir", "mine", "--config-name", "alone"],
            "mine/alone.yaml does not build on what ships with Trireme; begin it with 'defaults:",
        ),
        (["--config-dir", "mine", "--config-name="], "--config-name= is empty (unset shell variable?); give a value or drop it"),
        (["--config-dir", "nowhere"], "--config-dir=nowhere is not a folder"),
        (["-m", "--config-dir", "mine", "+experiment=fast,fats"], "experiment=fats does not exist"),
    ],
    ids=str,
)
def test_train_says_in_one_line_what_is_wrong(words: list[str], answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {answer}") and said.count("\n") == 1 and not Path("runs").exists()
