"""GGUF files are read back as what was written, by ourselves and by transformers; folders and files carry their tokenizer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from math import log
from pathlib import Path

import pytest
import torch

from tests.convert.test_logits import MODELS, SMALL, checkpoint, loaded, logits, ours, tokens
from tests.huggingface import MARKS, transformers
from trainer.convert import export_gguf, export_weights, import_weights
from trainer.convert.__main__ import main
from trainer.data.prepare import prepare
from trainer.shared.families.registry import FAMILIES
from trainer.shared.records.model_files import check_same
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import flatten
from trainer.shared.run.schema import DataConfig, ExpertsConfig, LatentConfig, ModelConfig, RopeConfig

pytestmark = MARKS

pytest.importorskip("gguf", reason="GGUF files are not tested: pip install -e '.[gguf]'")
WIDE = SMALL | {"hidden": 64, "heads": 2}
SHAPES = {
    "gpt": MODELS["gpt"],
    "llama": MODELS["llama"],
    "llama grouped tied": MODELS["llama grouped tied"],
    "bloom": MODELS["bloom"],
    "llama biases": ModelConfig(family="llama", biases=["qkv", "output"], head_width=12, kv_heads=2, **SMALL),  # type: ignore[arg-type]
    "llama linear": ModelConfig(family="llama", rope=RopeConfig("linear", factor=4.0), **SMALL),  # type: ignore[arg-type]
    "qwen2": ModelConfig(family="qwen2", kv_heads=2, **SMALL),  # type: ignore[arg-type]
    "qwen3": ModelConfig(family="qwen3", kv_heads=2, head_width=16, **SMALL),  # type: ignore[arg-type]
    "starcoder2": ModelConfig(family="starcoder2", kv_heads=2, **SMALL),  # type: ignore[arg-type]
    "llama3": ModelConfig(family="llama", rope=RopeConfig("llama3", factor=8.0, original=64), rope_theta=5e5, **WIDE),  # type: ignore[arg-type]
    "gemma2": ModelConfig(
        family="gemma2", kv_heads=2, window=5, full_every=2, score_cap=2.0, logit_cap=3.0, embedding_scale=32**0.5, **SMALL
    ),  # type: ignore[arg-type]
    "gemma3": ModelConfig(
        family="gemma3_text",
        kv_heads=2,
        window=5,
        full_every=6,
        embedding_scale=32**0.5,
        rope_theta=1e6,
        rope=RopeConfig("linear", factor=8.0, local_theta=1e4),
        **(SMALL | {"layers": 6}),
    ),  # type: ignore[arg-type]
    "olmo2": ModelConfig(family="olmo2", rope_theta=5e5, **SMALL),  # type: ignore[arg-type]
    "phi3": ModelConfig(family="phi3", kv_heads=2, rope=RopeConfig(share=0.5), **SMALL),  # type: ignore[arg-type]
    "phi3 longrope": ModelConfig(
        family="phi3",
        rope=RopeConfig("longrope", factor=2.0, original=8, short=[1.0, 1.25, 1.5, 2.0], long=[1.5, 2.5, 3.5, 4.0]),
        **SMALL,
    ),  # type: ignore[arg-type]
    "granite": ModelConfig(
        family="granite", kv_heads=2, attention_scale=0.25, embedding_scale=3.0, residual_scale=0.5, logit_scale=0.125, **SMALL
    ),  # type: ignore[arg-type]
    "smollm3": ModelConfig(family="smollm3", kv_heads=2, rope=RopeConfig(skip_every=4), **(SMALL | {"layers": 5})),  # type: ignore[arg-type]
    # all experts are visited: weights of 8 bits may move a token to another one
    "mixtral": ModelConfig(family="mixtral", kv_heads=2, ffn=64, experts=ExpertsConfig(count=4, active=4), **SMALL),  # type: ignore[arg-type]
    "qwen3_moe": ModelConfig(family="qwen3_moe", kv_heads=2, head_width=16, experts=ExpertsConfig(count=6, active=3, ffn=32), **SMALL),  # type: ignore[arg-type]
    "deepseek_v2": ModelConfig(
        family="deepseek_v2",
        latent=LatentConfig(kv_rank=32, query_rank=32, rotary=4, value=12),
        attention_scale=(1 + 0.0707 * log(2)) ** 2 / 12**0.5,
        rope=RopeConfig("yarn", factor=2.0, original=32, magnitude=1.0),
        experts=ExpertsConfig(count=4, active=4, ffn=32, shared_ffn=64, dense_layers=1, normalized=False),
        **SMALL,
    ),  # type: ignore[arg-type]
    "deepseek_v3": ModelConfig(
        family="deepseek_v3",
        latent=LatentConfig(kv_rank=32, query_rank=32, rotary=4, value=8),
        tied=False,
        experts=ExpertsConfig(
            **{"count": 4, "active": 4, "ffn": 32, "shared_ffn": 32, "dense_layers": 1, "router": "sigmoid", "scale": 2.5},
            correction=0.0,
        ),
        **SMALL,
    ),  # type: ignore[arg-type]
    "gpt_neox": ModelConfig(family="gpt_neox", rope=RopeConfig(share=0.25), **WIDE),  # type: ignore[arg-type]
}
IN_8_BITS = ("gpt", "llama grouped tied", "gemma2", "qwen3_moe", "deepseek_v3")
"""How a matrix is written does not depend on the family: the others are in the campaign."""
UNREAD = ("mixtral", "llama3", "gemma2", "olmo2", "phi3 longrope", "granite", "smollm3", "gpt_neox", "deepseek_v2", "deepseek_v3")
"""Of which transformers reads no file, or not all of what it says."""
TEXT = "def f(x):\n    return 'über', 1234  # <|endoftext|> \t\U0001f680"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("text")
    (root / "a.txt").write_text(TEXT * 50 + "the quick brown fox " * 100)
    prepare(DataConfig(source=str(root), path=str(root / "corpus"), vocab=300), False)
    return root / "corpus"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float16") for name in SHAPES),
        *(pytest.param(name, "q8_0", marks=[] if name in IN_8_BITS else pytest.mark.campaign("draws")) for name in SHAPES),
    ],
)
def test_a_file_is_read_back_with_equal_logits_by_ourselves_and_by_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    model = resolve_model(SHAPES[name])
    network = ours(model, seed=1)
    export_gguf(checkpoint(network, model, tmp_path / "c"), tmp_path / "m.gguf", dtype)
    again = import_weights(tmp_path / "m.gguf", tmp_path / "d")
    ids = tokens(model.vocab)
    mine = logits(loaded(tmp_path / "d", again), ids)
    check_same(flatten(model), flatten(again), FAMILIES[model.family])
    difference = (mine - logits(network, ids)).abs().max() / logits(network, ids).abs().max()
    assert difference < (2e-3 if dtype == "float16" else 5e-2)
    if name in UNREAD:
        return
    export_weights(tmp_path / "c", tmp_path / "hf")
    shape = transformers.AutoConfig.from_pretrained(
        tmp_path / "hf"
    )  # of a GPT-2 in GGUF transformers does not read positions and vocabulary
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", config=shape, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, mine, rtol=1e-4, atol=1e-4)


def test_import_of_what_was_exported_has_the_rounded_weights_bit_for_bit(tmp_path: Path) -> None:
    for number, name in enumerate(SHAPES):
        model = resolve_model(SHAPES[name])
        network = ours(model, seed=2)
        export_gguf(checkpoint(network, model, tmp_path / f"c{number}"), tmp_path / f"{number}.gguf")
        back = loaded(tmp_path / f"d{number}", import_weights(tmp_path / f"{number}.gguf", tmp_path / f"d{number}"))
        for (parameter, a), (_, b) in zip(network.named_parameters(), back.named_parameters()):
            if FAMILIES[model.family].norm_offset and parameter.endswith("norm.weight"):
                a = (1 + a) - 1  # a file holds the sum
            vector = a.dim() == 1 or parameter.endswith(("bias", "norm.weight", "router.weight")) or "positions" in parameter
            assert torch.equal(a if vector else a.half().float(), b), (name, parameter)


def test_folder_and_file_carry_the_tokenizer(corpus: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    model = resolve_model(ModelConfig(family="llama", **(SMALL | {"vocab": 304})))  # type: ignore[arg-type]
    root = checkpoint(ours(model, seed=1), model, tmp_path / "c")
    shutil.copy(corpus / "tokenizer.json", root)
    export_weights(root, tmp_path / "hf")
    export_gguf(root, tmp_path / "m.gguf")
    import_weights(tmp_path / "m.gguf", tmp_path / "d")
    import_weights(tmp_path / "hf", tmp_path / "e")
    known = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = TEXT.replace("<|endoftext|>", "")
    assert theirs(text)["input_ids"] == known.encode(text).ids
    assert theirs.decode(theirs(text)["input_ids"]) == text and theirs.eos_token == "<|endoftext|>"
    settings = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").generation_config
    assert settings.eos_token_id == theirs.eos_token_id == known.token_to_id("<|endoftext|>")
    for place in ("d", "e"):
        again = Tokenizer.from_file(str(tmp_path / place / "tokenizer.json"))
        assert again.encode(TEXT).ids == known.encode(TEXT).ids and again.decode(again.encode(text).ids) == text


def test_named_and_added_tokens_come_back_from_a_folder_and_a_file(corpus: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    model = resolve_model(ModelConfig(family="llama", **(SMALL | {"vocab": 304})))  # type: ignore[arg-type]
    root = checkpoint(ours(model, seed=1), model, tmp_path / "c")
    known = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    known.add_special_tokens(["<s>", "</s>"])
    known.add_tokens(["<tool>"])
    known.save(str(root / "tokenizer.json"))
    named = {"eos_token_id": known.token_to_id("</s>"), "bos_token_id": known.token_to_id("<s>"), "pad_token_id": 0}
    (root / "generation_config.json").write_text(json.dumps(named))
    export_weights(root, tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").unlink()  # as older models, which say it in config.json alone
    import_weights(tmp_path / "hf", tmp_path / "d")
    export_gguf(tmp_path / "d", tmp_path / "m.gguf")
    import_weights(tmp_path / "m.gguf", tmp_path / "e")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (theirs.eos_token, theirs.bos_token) == ("</s>", "<s>")
    text = "is <tool> a word"
    for place in ("d", "e"):
        again = Tokenizer.from_file(str(tmp_path / place / "tokenizer.json"))
        assert again.encode(text).ids == known.encode(text).ids and again.decode(again.encode(text).ids) == text
        assert named.items() <= json.loads((tmp_path / place / "generation_config.json").read_text()).items()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (ModelConfig(family="smollm3", **SMALL), "model.rope.skip_every=0 cannot be exported"),  # type: ignore[arg-type]
        (ModelConfig(family="gemma2", embedding_scale=2.0, **SMALL), "model.embedding_scale=2.0 cannot be exported"),  # type: ignore[arg-type]
        (ModelConfig(family="mistral", window=5, **SMALL), "model.window=5 cannot be exported"),  # type: ignore[arg-type]
        (ModelConfig(family="llama", rope=RopeConfig("llama3", factor=8, original=64, low=2), **WIDE), "model.rope."),  # type: ignore[arg-type]
        (
            ModelConfig(family="llama", rope=RopeConfig("yarn", original=8, factor=2, magnitude=1.5), **SMALL),
            "model.rope.magnitude=1.5 cannot",
        ),  # type: ignore[arg-type]
    ],
)
def test_a_model_that_a_file_cannot_hold_is_refused_by_its_key(model: ModelConfig, said: str, tmp_path: Path) -> None:
    resolved = resolve_model(model)
    root = checkpoint(ours(resolved, 1), resolved, tmp_path / "c")
    with pytest.raises(ConfigError, match=re.escape(said)):
        export_gguf(root, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "full"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder], capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted: run the tests as root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_what_cannot_be_written_leaves_nothing(full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = resolve_model(ModelConfig(family="llama", layers=2, hidden=128, heads=2, vocab=512, seq=16))
    root = checkpoint(ours(model, seed=1), model, tmp_path / "c")
    export_gguf(root, tmp_path / "m.gguf")
    for words in (["export", root, full / "hf"], ["export", root, full / "x.gguf"], ["import", tmp_path / "m.gguf", full / "d"]):
        assert main([str(word) for word in words]) == 2
        error = capsys.readouterr().err
        assert re.match(r"error: cannot (ex|im)port to .*; make room", error), error
        assert error.count("\n") == 1 and not list(full.iterdir())
    (tmp_path / "t.txt").write_text("".join(f"{n} is a number\n" for n in range(40_000)))
    with pytest.raises(ConfigError, match=r"cannot be written: No space left on device; choose another folder, or free some space"):
        prepare(DataConfig(source=str(tmp_path / "t.txt"), path=str(full / "corpus"), vocab=300), False)
    assert [path.name for path in full.iterdir()] == [".corpus.lock"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["import", "torn.gguf", "d"], "torn.gguf cannot be read as GGUF"),
        (["import", "none.gguf", "d"], "none.gguf cannot be read as GGUF"),
        (["export", "c", "m.gguf", "--dtype", "float32"], "--dtype=float32 is not one of float16, q8_0, which m.gguf may have"),
        (["export", "c", "hf", "--tokenizer", "none"], "--tokenizer=none is not a tokenizer.json and holds none"),
    ],
)
def test_wrong_input_is_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = resolve_model(MODELS["llama"])
    checkpoint(ours(model, seed=1), model, tmp_path / "c")
    Path("torn.gguf").write_bytes(b"GGUF\x03\x00\x00")
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not Path("d").exists() and not Path("hf").exists() and not Path("m.gguf").exists()
