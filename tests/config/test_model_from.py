"""``model.from=FOLDER`` is the model that a Hugging Face config.json describes, in every command that composes a run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.config import compose, resolve
from trainer.shared.records.artifacts import CHECKPOINT_MANIFEST
from trainer.shared.records.model_files import to_config
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import ModelConfig

MODELS = [
    ModelConfig(family="gpt", layers=6, hidden=96, heads=6, vocab=300, seq=64),
    ModelConfig(family="llama", layers=2, hidden=64, heads=8, kv_heads=2, ffn=192, vocab=99, seq=32, rope_theta=5e5, tied=True),
    ModelConfig(family="bloom", layers=3, hidden=48, heads=4, vocab=77, seq=16),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.family)
@pytest.mark.parametrize("name", ["", "config.json"])
def test_a_model_is_read_from_its_config_whatever_the_defaults_are(model: ModelConfig, name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(to_config(resolve_model(model))))
    found = resolve(compose(["model=llama_tiny", f"model.from={tmp_path / name}"])).model
    assert found == dataclasses.replace(resolve_model(model), init_std=found.init_std)


def test_a_model_is_read_from_a_checkpoint(tmp_path: Path) -> None:
    model = resolve_model(dataclasses.replace(MODELS[1], norm_eps=1e-3))
    checkpoint = tmp_path / "step-00000000-start-0"
    checkpoint.mkdir()
    (checkpoint / CHECKPOINT_MANIFEST).write_text(json.dumps({"model": dataclasses.asdict(model)}))
    assert resolve(compose(["model=gpt_tiny", f"model.from={tmp_path}"])).model == model


def test_keys_beside_it_overrule_it_wherever_they_stand(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(to_config(resolve_model(MODELS[1]))))
    for words in (["model.seq=16", f"model.from={tmp_path}"], [f"model.from={tmp_path}", "model.seq=16"]):
        assert compose(words).model.seq == 16


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_type": "mamba"}', "model_type='mamba' cannot be imported; use gpt2, llama, bloom, "),
        ('{"model_type": "llama"}', "config.json has no"),
        ("[]", "cannot read"),
        ("{", "cannot read"),
    ],
)
def test_what_is_not_known_is_one_plain_error(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        compose([f"model.from={tmp_path}"])
    assert words in str(error.value) and f"model.from={tmp_path}" in str(error.value) and "\n" not in str(error.value)


def test_plan_and_a_sweep_understand_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(to_config(resolve_model(MODELS[0]))))
    run = ["model.from=.", "hardware=h100", "cluster.gpus_per_node=2", "data=synthetic"]
    assert main(["plan", *run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["layers"] == 6
    assert main(["train", "-m", *run, "layout.tensor=1,2", "--dry-run"]) == 0
    assert "model.layers=6" in capsys.readouterr().out
