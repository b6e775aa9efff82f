"""A file that says more than is read here is refused by the name of what it says; one that says it is off is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.convert.test_logits import MODELS, checkpoint, loaded, ours
from trainer.convert import export_gguf, export_weights, huggingface, import_weights
from trainer.shared.records.gguf_header import Header, model_in
from trainer.shared.records.model_files import from_config, to_config
from trainer.shared.records.rope_factors import divisors, stretching
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import RopeConfig

pytestmark = pytest.mark.slow  # imports transformers

HEADER: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 16,
    "llama.feed_forward_length": 32,
    "llama.context_length": 8,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.vocab_size": 5,
}


def header(**fields: Any) -> Any:
    header = Header(HEADER | {f"llama.{name.replace('__', '.')}": value for name, value in fields.items()}, set())
    return model_in(header, Path("m.gguf"))


def test_a_number_for_each_layer_is_read_where_all_are_equal() -> None:
    assert header(attention__head_count_kv=[2, 2], feed_forward_length=[32, 32]) == header()
    with pytest.raises(ConfigError, match=r"llama\.attention\.head_count_kv differs from layer to layer \(\[2, 4\]\)"):
        header(attention__head_count_kv=[2, 4])
    with pytest.raises(ConfigError, match=r"has no field llama\.attention\.head_count,"):
        header(attention__head_count=[])


def test_llamas_architecture_with_experts_is_mixtral() -> None:
    assert header(expert_count=0).family == "llama"
    mixtral = header(expert_count=8, expert_used_count=3)
    assert (mixtral.family, mixtral.experts.count, mixtral.experts.active) == ("mixtral", 8, 3)


@pytest.mark.parametrize(
    ("name", "off", "value"),
    [
        ("expert_shared_count", 0, 1),
        ("attention.sliding_window", 0, 4096),
        ("rope.dimension_count", 4, 2),
        ("attention.value_length", 4, 8),
        ("rope.scaling.factor", 0.0, 8.0),
    ],
)
def test_a_field_of_gguf_that_makes_another_model_is_refused_by_its_name(name: str, off: Any, value: Any) -> None:
    assert header(**{name: off}) == header()
    with pytest.raises(ConfigError, match=f"llama.{name}={value} cannot be imported"):
        header(**{name: value})


@pytest.mark.parametrize("family", ["gpt", "llama", "bloom"])
def test_a_key_of_a_config_that_nothing_here_understands_is_refused_by_its_name(family: str) -> None:
    config = to_config(resolve_model(MODELS[family]))
    labels = {"architectures": ["X"], "bos_token_id": 3, "use_cache": True, "torch_dtype": "float16", "residual_scale": None, "experts": 0}
    assert from_config(config | labels) == from_config(config)
    with pytest.raises(ConfigError, match=r"residual_scale=0\.5 of config\.json cannot be imported"):
        from_config(config | {"residual_scale": 0.5})


def test_one_key_and_value_head_for_all_queries_of_gpt2_is_refused() -> None:
    config = to_config(resolve_model(MODELS["gpt"]))
    assert from_config(config | {"attention_head_type": "multihead"}) == from_config(config)
    with pytest.raises(ConfigError, match="attention_head_type='multiquery' cannot be imported"):
        from_config(config | {"attention_head_type": "multiquery"})


def test_factors_of_rotary_frequencies_in_a_gguf_file_are_refused_unless_they_are_llamas_or_change_nothing(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="GGUF files are not tested: pip install -e '.[gguf]'")
    model = resolve_model(MODELS["llama"])
    network = ours(model, seed=1)
    root = checkpoint(network, model, tmp_path / "c")
    write = gguf.GGUFWriter.write_header_to_file
    for name, factors in (("same", [1, 1, 1, 1]), ("scaled", [1, 1, 6.5, 32])):
        with pytest.MonkeyPatch.context() as patch:  # a file of llama.cpp's converter has the tensor among the others
            patch.setattr(
                gguf.GGUFWriter,
                "write_header_to_file",
                lambda writer, f=factors: [writer.add_tensor("rope_freqs.weight", np.array(f, "<f4")), write(writer)],
            )
            export_gguf(root, tmp_path / f"{name}.gguf")
    import_weights(tmp_path / "same.gguf", tmp_path / "same")
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight does not scale rotary positions as Llama 3.1 does"):
        import_weights(tmp_path / "scaled.gguf", tmp_path / "scaled")
    assert not (tmp_path / "scaled").exists()


def test_factors_of_long_positions_are_whole_or_refused_in_one_line() -> None:
    name, short = "llama.rope.scaling.original_context_length", {"rope_factors_short.weight": [1.0, 2.0]}
    with pytest.raises(ConfigError, match=r"has no tensor rope_factors_long\.weight"):
        model_in(Header(HEADER, set(), short), Path("m.gguf"))
    with pytest.raises(ConfigError, match="original_context_length=1 must be 2 or more"):
        model_in(Header(HEADER | {name: 1}, set(), short | {"rope_factors_long.weight": [1.0, 3.0]}), Path("m.gguf"))


def test_shards_that_the_index_does_not_name_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "FILE_BYTES", 20_000)
    model = resolve_model(MODELS["llama"])
    network = ours(model, seed=3)
    export_weights(checkpoint(network, model, tmp_path / "c"), tmp_path / "hf")
    index = json.loads((tmp_path / "hf" / huggingface.INDEX).read_text())
    first = tmp_path / "hf" / min(index["weight_map"].values())
    stale = {name: tensor + 1 for name, tensor in load_file(first).items()}
    save_file(stale, tmp_path / "hf" / "model-00001-of-00099.safetensors")
    back = loaded(tmp_path / "d", import_weights(tmp_path / "hf", tmp_path / "d"))
    for (name, a), (_, b) in zip(network.named_parameters(), back.named_parameters()):
        assert a.equal(b), name
    save_file(stale, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has both model.safetensors and model\.safetensors\.index\.json"):
        import_weights(tmp_path / "hf", tmp_path / "e")
    (tmp_path / "hf" / "model.safetensors").unlink()
    (tmp_path / "hf" / huggingface.INDEX).unlink()
    with pytest.raises(ConfigError, match="in several files"):
        import_weights(tmp_path / "hf", tmp_path / "e")


@pytest.mark.parametrize(("width", "theta"), [(64, 500_000.0), (128, 10_000.0)])
@pytest.mark.parametrize(("original", "high", "factor"), [(8192, 4.0, 8.0), (4096, 3.0, 32.0), (1024, 8.0, 2.5)])
def test_the_stretch_of_rotary_positions_is_read_back_from_its_divisors(
    width: int, theta: float, original: int, high: float, factor: float
) -> None:
    keys = {"factor": factor, "original": original, "low": 1.0, "high": high}
    assert stretching(divisors(RopeConfig("llama3", **keys), width, theta), width, theta) == keys  # type: ignore[arg-type]
