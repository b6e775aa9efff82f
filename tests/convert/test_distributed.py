"""A distributed checkpoint of PyTorch with Hugging Face's names is imported bit for bit; one that is not is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.convert.test_logits import loaded, refusal, theirs_of
from tests.huggingface import MARKS, Library
from trainer.convert import import_weights

pytestmark = MARKS
dcp: Any = Library("torch.distributed.checkpoint")


def saved(folder: Path, kind: str, prefix: str, **more: Any) -> dict[str, Tensor]:
    """Saves a model of transformers as trainers do, with its config.json; its weights."""
    network = theirs_of(kind)
    weights = network.state_dict()
    state = {f"{prefix}{name}": tensor for name, tensor in weights.items()}
    dcp.save(state | more, checkpoint_id=folder, no_dist=True)
    (folder / "config.json").write_text(json.dumps(network.config.to_dict()))
    return weights


@pytest.mark.parametrize(("kind", "prefix"), [("gpt2", "model."), ("llama", ""), ("llama", "app.model."), ("bloom", "")])
def test_weights_come_over_bit_for_bit_and_training_state_stays_behind(kind: str, prefix: str, tmp_path: Path) -> None:
    weights = saved(tmp_path / "dcp", kind, prefix, **{"optim.state.exp_avg": torch.ones(3), "step": 5})
    network = loaded(tmp_path / "ours", import_weights(tmp_path / "dcp", tmp_path / "ours"))
    network_there = theirs_of(kind)
    network_there.load_state_dict(weights)
    network_there.save_pretrained(tmp_path / "hf")
    same = loaded(tmp_path / "again", import_weights(tmp_path / "hf", tmp_path / "again"))
    assert len(weights) and all(torch.equal(a, b) for a, b in zip(network.parameters(), same.parameters(), strict=True))


def test_a_checkpoint_that_cannot_be_read_is_refused_plainly(tmp_path: Path) -> None:
    saved(tmp_path / "dcp", "llama", "model.", **{"model.model.layers.0.router.weight": torch.ones(3)})
    assert "no place for model.model.layers.0.router.weight" in refusal(tmp_path / "dcp", tmp_path / "c")
    (tmp_path / "dcp" / ".metadata").write_bytes(b"torn")
    assert ".metadata cannot be read" in refusal(tmp_path / "dcp", tmp_path / "c")
    dcp.save({"tok_embeddings.weight": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert "names its tensors in another way" in refusal(tmp_path / "dcp", tmp_path / "c")
