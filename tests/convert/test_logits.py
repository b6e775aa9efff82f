"""Exported and imported weights give the logits of Hugging Face's own GPT-2, LLaMA and BLOOM."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.huggingface import MARKS, transformers
from trainer.checkpoint.folder import Folder
from trainer.checkpoint.pieces import whole
from trainer.checkpoint.shards import PieceSnapshot, Reader, write_rank
from trainer.convert import export_weights, huggingface, import_weights
from trainer.convert.__main__ import main, overrides
from trainer.models.transformer import Transformer
from trainer.shared.records.manifest import read_manifest
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import ExpertsConfig, LatentConfig, ModelConfig, RopeConfig

pytestmark = MARKS

SMALL = {"layers": 3, "hidden": 32, "heads": 4, "vocab": 61, "seq": 16}
MODELS = {
    "gpt": ModelConfig(family="gpt", **SMALL),  # type: ignore[arg-type]
    "gpt untied relu^2": ModelConfig(family="gpt", tied=False, activation="squared_relu", ffn=48, **SMALL),  # type: ignore[arg-type]
    "llama": ModelConfig(family="llama", rope_theta=500.0, **SMALL),  # type: ignore[arg-type]
    "llama grouped tied": ModelConfig(family="llama", kv_heads=2, ffn=80, tied=True, norm_eps=1e-6, **SMALL),  # type: ignore[arg-type]
    "bloom": ModelConfig(family="bloom", **(SMALL | {"heads": 2})),  # type: ignore[arg-type]
    "qwen3 window": ModelConfig(family="qwen3", kv_heads=2, head_width=12, window=5, full_every=2, **SMALL),  # type: ignore[arg-type]
    "gemma2": ModelConfig(
        family="gemma2",
        kv_heads=2,
        window=5,
        full_every=2,
        score_cap=2.0,
        logit_cap=3.0,
        embedding_scale=32**0.5,
        **SMALL,  # type: ignore[arg-type]
    ),
    "glm4_moe": ModelConfig(
        family="glm4_moe",
        kv_heads=2,
        rope=RopeConfig(share=0.5),
        experts=ExpertsConfig(count=4, ffn=12, shared_ffn=12, dense_layers=1, router="sigmoid", groups=2, active_groups=1, correction=0.0),
        **SMALL,  # type: ignore[arg-type]
    ),
    "deepseek_v2": ModelConfig(
        family="deepseek_v2",
        latent=LatentConfig(kv_rank=10, rotary=4, value=12),
        experts=ExpertsConfig(count=4, ffn=12, shared_ffn=12, normalized=False, scale=2.0),
        **SMALL,  # type: ignore[arg-type]
    ),
    "deepseek_v3": ModelConfig(
        family="deepseek_v3",
        latent=LatentConfig(kv_rank=10, query_rank=8, rotary=4, value=6),
        rope=RopeConfig(kind="yarn", factor=4.0, original=8, magnitude=1.0),
        attention_scale=(0.1 * math.log(4.0) + 1) ** 2 / math.sqrt(8 + 4),
        experts=ExpertsConfig(count=4, ffn=12, shared_ffn=12, dense_layers=1, router="sigmoid", groups=2, active_groups=1, correction=0.0),
        **SMALL,  # type: ignore[arg-type]
    ),
    "bloom odd heads": ModelConfig(family="bloom", **(SMALL | {"hidden": 24, "heads": 6})),  # type: ignore[arg-type]
}
THEIRS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 61, "n_positions": 16},
    "llama": {
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 56, "vocab_size": 61,
    },
    "bloom": {"n_layer": 2, "hidden_size": 32, "n_head": 4, "vocab_size": 61},
}  # fmt: skip
"""Settings of small networks there, by model type."""


def theirs_of(name: str) -> Any:
    """A network of ``THEIRS`` with random weights."""
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **THEIRS[name]))


def ours(model: ModelConfig, seed: int) -> Transformer:
    """A network with every parameter random, norms and biases too, so that no mix-up can hide."""
    network, generator = Transformer(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return network.eval()


def logits(network: Transformer, tokens: Tensor) -> Tensor:
    """[b, s] -> [b, s, V]; ours has the sequence first."""
    with torch.no_grad():
        return network(tokens.t()).transpose(0, 1)


def tokens(vocab: int) -> Tensor:
    return torch.randint(0, vocab, (2, 12), generator=torch.Generator().manual_seed(7))


def checkpoint(network: Transformer, model: ModelConfig, root: Path) -> Path:
    """A checkpoint of a network, as one rank would write it."""
    folder = Folder(root, "a run", 0, "t")
    folder.enter()
    write_rank(
        folder.workspace(1), 0, [PieceSnapshot(whole(n, p.shape), {"weight": p.detach().flatten()}) for n, p in network.named_parameters()]
    )
    folder.commit(1, 1, {"model": asdict(model), "data": None, "extra": {"samples": 0, "updates": 0}}, timeout_s=5)
    return root


def loaded(root: Path, model: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    (found,) = Folder(root, "", 0, "").found()
    reader, network = Reader(found.path, read_manifest(found)), Transformer(model).to(dtype)
    for name, parameter in network.named_parameters():
        reader.read(whole(name, parameter.shape), {"weight": parameter.detach().view(-1)})
    return network.eval()


@pytest.mark.parametrize("name", MODELS)
def test_exported_weights_give_our_logits_there(name: str, tmp_path: Path) -> None:
    model = resolve_model(MODELS[name])
    network = ours(model, seed=1)
    export_weights(checkpoint(network, model, tmp_path / "c"), tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    ids = tokens(model.vocab)
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, logits(network, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", THEIRS)
def test_imported_weights_give_their_logits_here(name: str, tmp_path: Path) -> None:
    theirs = theirs_of(name).eval()
    with torch.no_grad():
        for i, parameter in enumerate(theirs.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)))
    theirs.save_pretrained(tmp_path / "hf")
    model = import_weights(tmp_path / "hf", tmp_path / "c")
    ids = tokens(model.vocab)
    with torch.no_grad():
        torch.testing.assert_close(logits(loaded(tmp_path / "c", model), ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_export_and_import_are_inverse_bit_for_bit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "FILE_BYTES", 20_000)  # several files
    model = resolve_model(MODELS[name])
    network = ours(model, seed=2)
    export_weights(checkpoint(network, model, tmp_path / "c"), tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
    again = import_weights(tmp_path / "hf", tmp_path / "d")
    lost = ("init_std", "dropout", "attention_scale")
    assert {k: v for k, v in asdict(again).items() if k not in lost} == {k: v for k, v in asdict(model).items() if k not in lost}
    assert again.attention_scale == pytest.approx(model.attention_scale, rel=1e-12)  # some files hold the inverse of its square
    for (n, a), (_, b) in zip(network.named_parameters(), loaded(tmp_path / "d", again).named_parameters()):
        assert torch.equal(a, b), n


def test_several_files_load_as_one_model_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "FILE_BYTES", 20_000)
    model = resolve_model(MODELS["llama"])
    network = ours(model, seed=3)
    export_weights(checkpoint(network, model, tmp_path / "c"), tmp_path / "hf", dtype=torch.bfloat16)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(theirs.model.norm.weight, network.head.norm.weight.bfloat16())


def refusal(folder: Path, target: Path) -> str:
    with pytest.raises(ConfigError) as error:
        import_weights(folder, target)
    assert not list(target.glob("step-*"))
    return str(error.value)


def test_folders_that_cannot_be_imported_are_refused_plainly(tmp_path: Path) -> None:
    hf, target = tmp_path / "hf", tmp_path / "c"
    assert "cannot read" in refusal(tmp_path / "nothing", target)
    theirs_of("llama").save_pretrained(hf)
    config, weights = json.loads((hf / "config.json").read_text()), load_file(hf / "model.safetensors")

    def changed(**options: object) -> str:
        (hf / "config.json").write_text(json.dumps(config | options))
        return refusal(hf, target)

    assert "model_type='mamba' cannot be imported; use gpt2, llama" in changed(model_type="mamba")
    assert "has no tensor model.layers.0.self_attn.q_proj.bias" in changed(attention_bias=True)
    assert "rope_type='spiral'" in changed(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})
    assert "do not fill blocks.0.mlp.up.weight [2, 99, 32]" in changed(intermediate_size=99)
    (hf / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "vocab_size"}))
    assert "config.json has no vocab_size" in refusal(hf, target)
    (hf / "config.json").write_text(json.dumps(config))
    save_file(weights | {"model.layers.0.extra": torch.zeros(1)}, hf / "model.safetensors")
    assert "no place for model.layers.0.extra" in refusal(hf, target)
    save_file({k: v for k, v in weights.items() if k != "model.norm.weight"}, hf / "model.safetensors")
    assert "has no tensor model.norm.weight" in refusal(hf, target)
    (hf / "model.safetensors").write_bytes(b"torn")
    assert "model.safetensors cannot be read" in refusal(hf, target)
    (hf / "model.safetensors").unlink()
    assert "has no .safetensors file" in refusal(hf, target)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ModelConfig(family="gpt", activation="swiglu"), "model.activation=swiglu cannot be exported with model.family=gpt"),
        (ModelConfig(family="gpt", kv_heads=2), "model.kv_heads=2 cannot be exported with model.family=gpt"),
        (ModelConfig(family="bloom", ffn=100), "model.ffn=100 cannot be exported with model.family=bloom"),
    ],
)
def test_a_model_without_a_layout_there_is_refused_before_anything_is_written(model: ModelConfig, message: str, tmp_path: Path) -> None:
    resolved = resolve_model(model)
    folder = checkpoint(ours(resolved, 0), resolved, tmp_path / "c")
    with pytest.raises(ConfigError) as error:
        export_weights(folder, tmp_path / "hf")
    assert message in str(error.value) and sorted(p.name for p in tmp_path.iterdir()) == ["c"]


def test_the_program_converts_both_ways_and_says_how_to_train_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = resolve_model(MODELS["llama grouped tied"])
    folder = checkpoint(ours(model, 5), model, tmp_path / "c")
    assert main(["export", str(folder), str(tmp_path / "hf")]) == 0
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "d")]) == 0
    said = capsys.readouterr().out
    assert f"run.checkpoint.dir={tmp_path / 'd'} {overrides(model)}" in said and "model.tied=true" in said
    assert main(["export", str(folder), str(tmp_path / "hf")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'hf'} exists already; give another name\n"
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "x")]) == 2
    assert "is not a checkpoint and holds none" in capsys.readouterr().err


def test_an_import_replaces_nothing_and_leaves_nothing_where_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, mine = tmp_path / "hf", tmp_path / "mine"
    theirs_of("llama").save_pretrained(hf)
    mine.mkdir()
    (mine / "tokenizer.json").write_text("MINE")
    for target in (mine, hf):
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        assert main(["import", str(hf), str(target)]) == 2
        assert capsys.readouterr().err == f"error: {target} exists already; give another name\n"
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    (mine / "tokenizer.json").unlink()
    (tmp_path / ".mine.partial").mkdir()  # an import that was killed
    (tmp_path / ".mine.partial" / "tokenizer.json").write_text("half")
    assert main(["import", str(hf), str(mine)]) == 0  # an empty folder has nothing to lose
    assert sorted(path.name for path in mine.iterdir()) == [".start-0", "generation_config.json", "step-00000000-start-0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mine"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("gpt2", {"n_head": value}) for value in ("x", 0, True)),
        *(("gpt2", {"n_layer": value}) for value in (None, 1.5, [])),
        *(("gpt2", {"vocab_size": value}) for value in (None, -1)),
        *(("gpt2", change) for change in ({"n_embd": 0}, {"n_positions": "x"}, {"layer_norm_epsilon": "x"}, {"activation_function": []})),
        *(("llama", change) for change in ({"num_attention_heads": 0}, {"hidden_size": "x"}, {"rope_parameters": {"rope_theta": "x"}})),
        *(("llama", change) for change in ({"rope_parameters": [1]}, {"rope_parameters": {"rope_theta": 10**400}})),
    ],
    ids=str,
)
def test_a_wrong_value_in_a_config_is_one_plain_error(
    name: str, change: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs_of(name).save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "c")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    theirs_of("gpt2").save_pretrained(tmp_path / "hf")
    for content in ("[]", "3", "[" * 100_000):
        (tmp_path / "hf" / "config.json").write_text(content)
        assert "config.json: " in refusal(tmp_path / "hf", tmp_path / "c")


def test_whoever_may_read_the_folder_may_read_the_weights(tmp_path: Path) -> None:
    model = resolve_model(MODELS["gpt"])
    folder = checkpoint(ours(model, 1), model, tmp_path / "c")
    for mask, mode in ((0o022, 0o644), (0o027, 0o640)):
        before = os.umask(mask)
        try:
            export_weights(folder, tmp_path / f"hf{mask}")
        finally:
            os.umask(before)
        assert (tmp_path / f"hf{mask}" / "model.safetensors").stat().st_mode & 0o777 == mode
