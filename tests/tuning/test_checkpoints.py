"""What tuning adds is saved alone, resumed under another layout, refused on another base, and merged exactly."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.farm import Farm, Finished
from tests.small_runs import ranks, small
from trainer.checkpoint.pieces import whole
from trainer.checkpoint.shards import Reader
from trainer.checkpoint.tuned import open_reader
from trainer.convert import export_gguf, import_weights
from trainer.data.dataset import Synthetic
from trainer.models.transformer import Transformer
from trainer.models.tuned import add_tuning
from trainer.shared.records.artifacts import newest_checkpoint
from trainer.shared.records.manifest import FoundCheckpoint, read_manifest
from trainer.shared.records.model_files import model_of
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import TrainConfig

pytestmark = pytest.mark.slow

MODEL = {"family": "llama", "kv_heads": 2, "tied": False}
TUNES = {"lora": {"method": "lora", "rank": 3, "alpha": 6.0}, "ia3": {"method": "ia3"}}


def run(farm: Farm, folder: Path, steps: int, tune: dict[str, Any], seed: int = 1234, **layout: Any) -> Finished:
    further = {"steps": steps, "warmup_steps": 0, "seed": seed, "checkpoint": {"every": 4, "dir": str(folder)}}
    config = small(model=MODEL, run=further, optimizer={"lr": 0.02, "decay_steps": 8}, **layout)
    return farm.train(config | {"tune": tune}, ranks(layout))


@pytest.fixture(scope="module")
def base(farm: Farm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    run(farm, folder, 4, {}, tensor=2).checked()
    return folder


def opened(folder: Path, merge: bool = True) -> Any:
    path = newest_checkpoint(folder)
    assert path is not None
    found = FoundCheckpoint(0, 0, path)
    return open_reader(found, read_manifest(found), merge)


def weights(reader: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, shape in reader.shapes.items():
        found[name] = torch.empty(whole(name, shape).numel, dtype=torch.float64)
        reader.read(whole(name, shape), {"weight": found[name]})
    return {name: values.view(reader.shapes[name]) for name, values in found.items()}


@pytest.mark.parametrize("method", TUNES)
def test_added_weights_are_saved_alone_and_resumed_under_another_layout(farm: Farm, base: Path, tmp_path: Path, method: str) -> None:
    tune = TUNES[method] | {"base": str(base)}
    through = run(farm, tmp_path / "one", 8, tune).checked().result["losses"]
    run(farm, tmp_path / "two", 4, tune, tensor=2, sequence_parallel=True).checked()
    again = run(farm, tmp_path / "two", 8, tune, pipeline=2, data=2, sharding={"params": 2, "grads": 2, "optimizer": 2}).checked()
    assert again.result["losses"] == pytest.approx(through[4:], rel=1e-10)
    alone = opened(tmp_path / "two", merge=False).added
    assert isinstance(alone, Reader) and all("lora_" in name or "scale" in name for name in alone.shapes)


@pytest.mark.parametrize("method", TUNES)
def test_merged_weights_compute_what_the_added_ones_compute(farm: Farm, base: Path, tmp_path: Path, method: str) -> None:
    """Also where a tensor-parallel run wrote them (Megatron-Bridge#2193)."""
    tune = TUNES[method] | {"base": str(base)}
    run(farm, tmp_path, 4, tune, tensor=2).checked()
    config = resolve(from_dict(TrainConfig, small(model=MODEL) | {"tune": tune}), 1)
    merged = Transformer(config.model).double()
    merged.load_state_dict(weights(opened(tmp_path)))
    found = weights(opened(tmp_path, merge=False))
    tuned = Transformer(config.model).double()
    add_tuning(tuned, config.model, config.tune)
    with_product = _applied(tuned.double(), found)
    tokens = torch.randint(config.model.vocab, (config.model.seq, 2), generator=torch.Generator().manual_seed(0))
    plain = Transformer(config.model).double()
    plain.load_state_dict({name: found[name] for name in plain.state_dict()})
    assert float((plain(tokens) - with_product(tokens)).detach().abs().max()) > 1e-3
    torch.testing.assert_close(merged(tokens), with_product(tokens), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", ["gpt", *(pytest.param(name, marks=pytest.mark.campaign("layouts")) for name in ("llama", "bloom"))])
def test_a_model_is_tuned_in_shorter_rows_and_keeps_the_length_of_its_base(farm: Farm, tmp_path: Path, family: str, method: str) -> None:
    def short(steps: int, seq: int, folder: str, tune: dict[str, Any], **layout: Any) -> Finished:
        settings = {"steps": steps, "warmup_steps": 0, "checkpoint": {"every": 2, "dir": str(tmp_path / folder)}}
        config = small(
            model={"family": family, "seq": seq, "layers": 2, "tied": False},
            run=settings,
            optimizer={"lr": 0.02, "decay_steps": 8},
            **layout,
        )
        return farm.train(config | {"tune": tune}, ranks(layout))

    short(2, 16, "base", {}).checked()
    before, tune = weights(opened(tmp_path / "base")), {"method": method, "rank": 2, "base": str(tmp_path / "base")}
    losses = short(2, 8, "tuned", tune, tensor=2, sequence_parallel=True).checked().result["losses"]
    config = resolve(from_dict(TrainConfig, small(model={"family": family, "seq": 16, "layers": 2, "tied": False})), 1)
    model = Transformer(config.model).double()
    model.load_state_dict(before)
    rows = torch.from_numpy(Synthetic(config.model.vocab, 8, config.run.seed).batch(0, 4)).t()
    assert losses[0] == pytest.approx(float(torch.nn.functional.cross_entropy(model(rows[:-1]).flatten(0, 1), rows[1:].flatten())))
    short(4, 8, "tuned", tune, pipeline=2).checked()
    after = weights(opened(tmp_path / "tuned"))
    assert {name: values.shape for name, values in after.items()} == {name: values.shape for name, values in before.items()}
    assert model_of(tmp_path / "tuned").seq == 16
    failed = short(2, 32, "longer", tune).failure(0)
    assert "model.seq=32 is longer than the 16 positions that checkpoint" in failed["message"]


def test_a_file_of_a_tuned_model_holds_its_merged_weights(farm: Farm, base: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="GGUF files are not tested: pip install -e '.[gguf]'")
    run(farm, tmp_path / "tuned", 4, TUNES["lora"] | {"base": str(base)}, tensor=2).checked()
    export_gguf(tmp_path / "tuned", tmp_path / "m.gguf")
    import_weights(tmp_path / "m.gguf", tmp_path / "read")
    before, after, read = (weights(opened(folder)) for folder in (base, tmp_path / "tuned", tmp_path / "read"))
    assert read.keys() == after.keys()
    for name, values in after.items():
        torch.testing.assert_close(read[name], values, rtol=2**-10, atol=1e-7, msg=name)  # matrices are written in float16
    assert any((read[name] - values).abs().max() > 1e-3 for name, values in before.items())


def _applied(model: Transformer, found: dict[str, torch.Tensor]) -> Transformer:
    """``model`` with all weights, where the product of a plain low-rank layer is computed by a hook."""
    model.load_state_dict(found)
    for layer in model.modules():
        if hasattr(layer, "lora_a"):
            layer.register_forward_hook(
                lambda own, inputs, y: y + own.scale * (inputs[0] @ own.lora_a.t() @ own.lora_b.flatten(0, -2).t()).view(y.shape)
            )
    return model


def test_added_weights_of_another_base_are_refused_in_one_line(farm: Farm, base: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    run(farm, other, 4, {}, seed=7).checked()
    run(farm, tmp_path / "run", 4, TUNES["lora"] | {"base": str(base)}).checked()
    failed = run(farm, tmp_path / "run", 8, TUNES["lora"] | {"base": str(other)})
    assert failed.codes == {0: 2}
    assert "was tuned from another base" in failed.failure(0)["message"] and "\n" not in failed.failure(0)["message"]
    wider = run(farm, tmp_path / "run", 8, TUNES["lora"] | {"base": str(base), "rank": 4})
    assert "is of another tuning: tune.rank=3 there, 4 here" in wider.failure(0)["message"]
    itself = run(farm, tmp_path / "more", 4, TUNES["lora"] | {"base": str(tmp_path / "run")})
    assert "holds lora weights alone, without their base" in itself.failure(0)["message"]


def test_a_method_that_cannot_be_merged_is_refused_in_one_line(farm: Farm, base: Path, tmp_path: Path) -> None:
    run(farm, tmp_path, 4, {"method": "adapter", "rank": 2, "base": str(base)}).checked()
    with pytest.raises(ConfigError, match="holds weights of adapter, which cannot be merged"):
        opened(tmp_path)


def test_a_base_that_is_gone_is_named_with_what_was_tuned_from_it(farm: Farm, base: Path, tmp_path: Path) -> None:
    own, tuned = tmp_path / "own", tmp_path / "tuned"
    shutil.copytree(base, own)
    run(farm, tuned, 4, TUNES["lora"] | {"base": str(own)}).checked()
    opened(tuned)
    shutil.rmtree(own)
    with pytest.raises(ConfigError, match=rf"tuned/step-.* was tuned from {own}, which is not there any more or has changed; put the"):
        opened(tuned)
    run(farm, tmp_path / "initial", 4, TUNES["lora"]).checked()
    with pytest.raises(ConfigError, match=r"was tuned from initial weights, which no checkpoint holds; tune from a tune\.base"):
        opened(tmp_path / "initial")
