"""The config.json of published models is read for planning: each with the parameters of its weights, or refused by the name of a key.

``published_configs.json`` holds what such a file says of the shape, and the number of parameters as published: of all tensors of the
weights, or in words where only those are known. ``beyond``: those among them that are of no block, of a module that predicts further tokens.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import main
from launcher.cost.inputs.shape import Shape
from trainer.shared.records.model_files import from_config, read_model, to_config, to_import
from trainer.shared.run.errors import ConfigError

PUBLISHED: Mapping[str, Mapping[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())
OF_FAMILY = {entry["config"]["model_type"]: name for name, entry in PUBLISHED.items()}
"""One model for each model type."""


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    return {**PUBLISHED[name]["config"], **changes}


def parameters(config: Mapping[str, Any]) -> float:
    """Without modules that predict further tokens."""
    return float(Shape.of(dataclasses.replace(from_config(config), predicted_tokens=0)).parameters)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_counted_with_its_published_parameters(name: str) -> None:
    published, counted = PUBLISHED[name]["parameters"], parameters(config_of(name))
    if isinstance(published, str):
        assert f"{counted / 1e9:.3g}B" == published
    else:
        assert counted == pytest.approx(published - PUBLISHED[name].get("beyond", 0), rel=1e-3)


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("name", OF_FAMILY.values())
def test_parameters_are_exactly_those_of_the_modules_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = config_of(name, model_type={"kimi_k2": "deepseek_v3"}.get(config_of(name)["model_type"], config_of(name)["model_type"]))
    config.pop("quantization_config", None)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    assert parameters(config_of(name)) == sum(each.numel() for each in built.parameters())


VARIANTS: dict[str, dict[str, Any]] = {
    "gemma_2b": {"attention_bias": True},
    "qwen1.5_moe_a2.7b": {"decoder_sparse_step": 2, "mlp_only_layers": [0, 1, 2], "qkv_bias": False},
    "qwen3_30b_a3b": {"mlp_only_layers": [0], "attention_bias": True},
    "llama_4_scout_text": {"moe_layers": [*range(1, 48, 2)]},
    "falcon_7b": {"new_decoder_architecture": True, "num_kv_heads": 71, "num_ln_in_parallel_attn": 1, "bias": True},
    "falcon_40b": {"new_decoder_architecture": False, "parallel_attn": False, "multi_query": False},
    "opt_6.7b": {"enable_bias": False},
    "nemotron_4_15b": {"attention_bias": True, "mlp_bias": True, "head_dim": 64},
    "deepseek_v2": {"q_lora_rank": None, "v_head_dim": 64, "first_k_dense_replace": 4},
    "glm_4.5": {"attention_bias": False, "use_qk_norm": False},
    "gpt_oss_20b": {"attention_bias": False, "tie_word_embeddings": True},
    "gpt_j_6b": {"n_inner": 8192},
}
"""Models of the same families that have what the published one has not, or the other way round."""


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_of_a_variant_are_those_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = config_of(name, **VARIANTS[name])
    config.pop("quantization_config", None)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    counted = parameters(config)
    assert counted == sum(each.numel() for each in built.parameters()) != parameters(config_of(name))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral_8x7b", {"model_type": "jamba"}, "model_type='jamba' cannot be imported"),
    ("mixtral_8x7b", {"model_type": "qwen3_next"}, "model_type='qwen3_next' cannot be imported"),
    ("llama_3.1_8b", {"vision_config": {"hidden_size": 1280}}, "vision_config .* give its text_config as a file of its own"),
    ("llama_3.1_8b", {"rope_scaling": {"rope_type": "mrope"}}, "rope_type='mrope'"),
    ("qwen3_30b_a3b", {"layer_types": ["full_attention", "linear_attention"] * 24}, r"layer_types=\[.*linear_attention"),
    ("olmo_3_7b", {"layer_types": (["sliding_attention"] * 5 + ["full_attention"] * 3) * 4}, "not each so many-th"),
    ("olmo_3_7b", {"layer_types": ["full_attention"]}, r"layer_types=\['full_attention'\]"),
    ("olmo_3_7b", {"sliding_window": 0}, "sliding_window=0 of config.json"),
    ("olmo_3_7b", {"sliding_window": -1}, "sliding_window=-1 of config.json"),
    ("opt_6.7b", {"word_embed_proj_dim": 512}, "word_embed_proj_dim=512, which is not hidden_size=4096"),
    ("opt_6.7b", {"do_layer_norm_before": False}, "do_layer_norm_before=False"),
    ("mixtral_8x7b", {"hidden_size": "big"}, "hidden_size: model.hidden='big' is not a whole number"),
    ("mixtral_8x7b", {"num_attention_heads": 0}, "num_attention_heads: model.heads=0"),
    ("mixtral_8x7b", {"num_experts_per_tok": 9}, "model.experts.active=9 is more than model.experts.count=8"),
    ("mixtral_8x7b", {"mamba_d_state": 16}, "mamba_d_state=16 of config.json cannot be imported"),
    ("mixtral_8x7b", {"sliding_window": 64, "sliding_window_size": 32}, "sliding_window_size=32 of config.json cannot be imported"),
    ("qwen3_30b_a3b", {"mlp_only_layers": [7]}, r"mlp_only_layers=\[7\], which are not the leading blocks"),
    ("llama_4_scout_text", {"moe_layers": [0, 5]}, r"moe_layers=\[0, 5\], which flags blocks other than each so many-th"),
    ("llama_4_scout_text", {"no_rope_layers": [1, 0, 0, 1] * 12}, "no_rope_layers="),
    ("deepseek_v3", {"n_shared_experts": -1}, "n_shared_experts=-1 of config.json"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2 cannot be imported"),
    ("mpt_7b", {"attn_config": {"clip_qkv": 6}}, "clip_qkv=6 of attn_config"),
    ("gemma_2b", {"hidden_activation": "silu"}, "hidden_activation='silu'"),
]


@pytest.mark.parametrize(("name", "changes", "words"), REFUSED, ids=lambda value: next(iter(value)) if isinstance(value, dict) else None)
def test_a_model_that_is_not_understood_is_refused_in_one_line_by_the_name_of_the_key(
    name: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        from_config(config_of(name, **changes))
    assert re.search(words, str(error.value)) and "\n" not in str(error.value)


def test_a_missing_key_is_refused_by_its_name() -> None:
    config = config_of("mixtral_8x7b")
    del config["num_attention_heads"]
    with pytest.raises(ConfigError, match=r"config\.json has no num_attention_heads"):
        from_config(config)


def test_a_window_beyond_the_sequence_is_read_and_changes_no_work() -> None:
    far, none = (Shape.of(from_config(config_of("mixtral_8x7b", sliding_window=window))) for window in (10**6, None))
    assert far.window == 10**6 and far.model_flops() == none.model_flops()


def test_a_text_decoder_inside_of_a_config_is_read_without_towers_beside_it() -> None:
    text = config_of("mixtral_8x7b")
    assert from_config({"model_type": "outer", "text_config": text}) == from_config(text)
    del text["model_type"], text["tie_word_embeddings"]
    outer = {"model_type": "mixtral", "tie_word_embeddings": True, "text_config": text, "vision_config": None}
    assert from_config(outer) == from_config(config_of("mixtral_8x7b", tie_word_embeddings=True))


def test_positions_and_windows_of_published_models_are_those_of_their_reports() -> None:
    olmo, scout = from_config(config_of("olmo_3_7b")), from_config(config_of("llama_4_scout_text"))
    assert (olmo.window, olmo.full_every, olmo.rope.kind, olmo.rope.local_theta) == (4096, 4, "yarn", 5e5)
    assert (scout.window, scout.full_every, scout.rope.skip_every, scout.rope.kind) == (8192, 4, 4, "llama3")
    assert [from_config(config_of(name)).rope.share for name in ("gpt_j_6b", "nemotron_4_15b", "glm_4.5")] == [0.25, 0.5, 0.5]
    assert [from_config(config_of(name)).predicted_tokens for name in ("deepseek_v3", "kimi_k2", "glm_4.5")] == [1, 0, 1]
    lite = from_config(config_of("deepseek_v2_lite"))
    assert lite.rope.magnitude == 1 and lite.attention_scale == pytest.approx((1 + 0.0707 * 3.68888) ** 2 / 192**0.5, rel=1e-4)
    ropes = {
        "full_attention": {**config_of("olmo_3_7b")["rope_scaling"], "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    }
    assert from_config(config_of("olmo_3_7b", rope_scaling=None, rope_theta=None, rope_parameters=ropes)).rope == olmo.rope


def test_weights_of_a_family_without_names_of_tensors_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("gpt_oss_20b")))
    (tmp_path / "model.safetensors").write_bytes(b"")
    words = "weights of model.family=gpt_oss are neither read nor written here yet"
    for use in (to_import, lambda folder: to_config(read_model(folder))):
        with pytest.raises(ConfigError, match=words):
            use(tmp_path)


@pytest.mark.slow  # imports torch
def test_no_rule_of_conversion_is_made_for_such_a_family() -> None:
    from trainer.convert.rules import rules

    with pytest.raises(ConfigError, match=r"weights of model\.family=gpt_oss are neither read nor written"):
        next(rules(from_config(config_of("gpt_oss_20b"))))


@pytest.mark.parametrize("name", ["nemotron_4_15b", "mixtral_8x7b", "deepseek_v2"])
def test_dense_expert_and_latent_models_are_planned_from_their_config(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps(config_of(name)))
    run = [f"model.from={file}", "trainer=megatron_core", "hardware=h100", "data=synthetic", "model.seq=4096", "run.precision=bf16"]
    assert main(["plan", *run, "run.global_batch=512", "cluster.nodes=32", "cluster.gpus_per_node=8", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["model"]["family"] == from_config(config_of(name)).family and said["model"]["seq"] == 4096


def test_our_own_trainer_says_that_it_does_not_train_modules_of_further_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("deepseek_v3")))
    assert main(["train", f"model.from={tmp_path}", "data=synthetic", "--dry-run"]) == 2
    assert "model.predicted_tokens=1 can be planned but not trained here yet" in capsys.readouterr().err
