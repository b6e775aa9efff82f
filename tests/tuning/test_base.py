"""A wrong base of a tuning is found before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.config import compose, locate_data, resolve
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import to_dict

pytestmark = pytest.mark.slow

WORDS = ["model=gpt_tiny", "data=synthetic", "tune.method=lora"]
MODEL = to_dict(resolve(compose(WORDS)).model)


def base(folder: Path, **manifest: object) -> Path:
    checkpoint = folder / "step-000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text(json.dumps({"model": MODEL, **manifest}))
    return folder


def located(path: Path) -> str | None:
    return locate_data(resolve(compose([*WORDS, f"tune.base={path}"]))).tune.base


def test_a_base_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    assert located(Path("base")) == str(tmp_path / "base")


def test_a_folder_without_a_checkpoint_is_no_base(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^tune\.base=.* is not a checkpoint"):
        located(tmp_path)


def test_what_a_tuning_added_is_no_base(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^tune\.base=.* cannot be a base; merge it first"):
        located(base(tmp_path / "adapter", tune={"method": "lora"}))


def test_a_base_of_another_model_is_refused_before_a_rank_starts(tmp_path: Path) -> None:
    theirs = base(tmp_path / "base", model={**MODEL, "family": "llama"})
    with pytest.raises(ConfigError) as refused:
        located(theirs)
    assert str(refused.value) == (
        f"tune.base={theirs}: checkpoint {theirs / 'step-000004'} is of another model: model.family=llama there, gpt here; "
        "give the model of the base, or another tune.base"
    )
    with pytest.raises(ConfigError, match=r"model\.seq=\d+ is longer than the 8 positions that checkpoint .* was made for; use 8 or less"):
        located(base(tmp_path / "short", model={**MODEL, "seq": 8}))
    assert located(base(tmp_path / "long", model={**MODEL, "seq": 2 * MODEL["seq"]}))
    assert located(base(tmp_path / "alike", model={**MODEL, "dropout": 0.5, "init_std": 1.0}))
