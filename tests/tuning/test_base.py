"""A wrong base of a tuning is found before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.config import compose, locate_data, resolve
from trainer.spec import ConfigError


def base(folder: Path, **manifest: object) -> Path:
    checkpoint = folder / "step-000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text(json.dumps({"model": {}, **manifest}))
    return folder


def located(path: Path) -> str | None:
    words = ["model=gpt_tiny", "data=synthetic", "tune.method=lora", f"tune.base={path}"]
    return locate_data(resolve(compose(words))).tune.base


def test_a_base_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    assert located(Path("base")) == str(tmp_path / "base")


def test_a_folder_without_a_checkpoint_is_no_base(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^tune\.base=.* is no checkpoint"):
        located(tmp_path)


def test_what_a_tuning_added_is_no_base(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^tune\.base=.* is no base; merge it first"):
        located(base(tmp_path / "adapter", tune={"method": "lora"}))
