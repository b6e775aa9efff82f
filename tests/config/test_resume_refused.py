"""A run that cannot go on from what ``run.checkpoint.dir`` names is refused before a rank starts, in the words of the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launcher.config import compose, locate_data, resolve
from tests.convert.test_logits import SMALL, checkpoint, ours
from trainer.checkpoint.folder import Folder
from trainer.checkpoint.pieces import whole
from trainer.checkpoint.shards import PieceSnapshot, write_rank
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import to_dict
from trainer.shared.run.schema import ModelConfig

pytestmark = pytest.mark.slow

MODEL = resolve_model(ModelConfig(**SMALL))  # type: ignore[arg-type]
GIVEN = ["data=synthetic", "cluster.gpus_per_node=1", "layout.data=1", *(f"model.{name}={value}" for name, value in SMALL.items())]


def saved(root: Path, data: dict[str, object] | None = None) -> Path:
    """A folder with a checkpoint of one weight."""
    folder = Folder(root, "a run", 0, "t")
    folder.enter()
    write_rank(folder.workspace(6), 0, [PieceSnapshot(whole("w", (2,)), {"weight": torch.zeros(2)})])
    facts = {"model": to_dict(MODEL), "data": data, "extra": {"samples": 48, "updates": 6}}
    folder.commit(6, 1, facts, timeout_s=5)
    return root / "step-00000006-start-0"


def located(*words: str) -> None:
    locate_data(resolve(compose([*GIVEN, *words])))


def refusal(root: Path, *words: str) -> str:
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    with pytest.raises(ConfigError) as caught:
        located(*words)
    assert "\n" not in str(caught.value) and {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    return str(caught.value)


def test_one_checkpoint_and_a_trial_are_refused_with_the_folder_that_is_meant(tmp_path: Path) -> None:
    one = saved(tmp_path / "trial" / "checkpoints")
    for given, what in ((one, "is one checkpoint"), (tmp_path / "trial", "holds the folder of a run's checkpoints")):
        said = refusal(tmp_path, f"run.checkpoint.dir={given}")
        assert f"run.checkpoint.dir={given} {what}" in said and said.endswith(f"give run.checkpoint.dir={one.parent}")
    located(f"run.checkpoint.dir={one.parent}")
    located(f"run.checkpoint.dir={tmp_path / 'not yet'}")


def test_what_the_ranks_would_refuse_to_go_on_from_is_refused_before_they_start(tmp_path: Path) -> None:
    one = saved(tmp_path / "c", {"seed": 7, "corpus": "synthetic", "global_batch": 8})
    given = f"run.checkpoint.dir={tmp_path / 'c'}"
    located(given, "run.seed=7")
    assert "is of other data: run.seed was 7 and is 8 now" in refusal(tmp_path, given, "run.seed=8")
    located(given, "run.seed=8", "run.checkpoint.new_data=true")
    located(given, "run.seed=8", "run.checkpoint.resume=false")
    half = SMALL["seq"] // 2  # type: ignore[operator]
    said = refusal(tmp_path, given, "run.seed=7", f"model.seq={half}")
    assert f"is of other data: model.seq was {SMALL['seq']} and is {half} now" in said
    located(given, f"model.seq={half}", "run.checkpoint.new_data=true")
    assert "is of another model: model.hidden=32 there, 64 here" in refusal(tmp_path, given, "run.seed=7", "model.hidden=64")
    assert "is of another tuning: tune.method=full there, lora here" in refusal(
        tmp_path, given, "run.seed=7", "tune.method=lora", "tune.rank=2"
    )
    (one / "manifest.json").write_text("{}")
    assert "format is missing, and no older one is complete" in refusal(tmp_path, given, "run.seed=7")


def test_a_damaged_checkpoint_is_passed_over_where_an_older_one_is_whole(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    (tmp_path / "c" / "step-00000009-start-0").mkdir()
    located(f"run.checkpoint.dir={tmp_path / 'c'}")
    assert checkpoint(ours(MODEL, 1), MODEL, tmp_path / "d")
    located(f"run.checkpoint.dir={tmp_path / 'd'}")
