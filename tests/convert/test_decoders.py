"""Families that are trained compute what Hugging Face's own networks compute, with the same gradients, and are converted both ways.

There parts of a network are computed in single precision whatever its weights are; here all of it is in double, so that what differs is
a mistake and not rounding.
"""

from __future__ import annotations

import importlib
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.convert.test_logits import loaded
from tests.huggingface import MARKS, transformers
from trainer.convert import export_weights, huggingface, import_weights
from trainer.convert.rules import rules
from trainer.models.experts import balance_losses, choose
from trainer.shared.records.model_files import from_config
from trainer.shared.run.schema import ExpertsConfig

pytestmark = MARKS

LENGTH, VOCAB = 14, 53
SEEDS = int(os.environ.get("SEEDS", 2))
MODULES = {"gemma3_text": "gemma3"}
RENAMED = {"embed_out.": "lm_head.", ".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
"""Parts of names in files and in networks there."""
CORRECTION = "e_score_correction_bias"
Config = dict[str, Any]


class Double:
    """``torch``, in which single precision is double."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def double(name: str) -> Iterator[None]:
    """All that Hugging Face's network of a kind computes is computed in double precision."""
    place = MODULES.get(name, name)
    with pytest.MonkeyPatch.context() as patch:
        for module in (f"transformers.models.{place}.modeling_{place}", "transformers.modeling_rope_utils"):
            patch.setattr(importlib.import_module(module), "torch", Double())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def rope(draw: random.Random, width: int, kinds: str = "default linear llama3 yarn") -> Config:
    """``rope_parameters`` of a random kind, for ``width`` dimensions that turn."""
    kind = draw.choice(kinds.split())
    own: dict[str, Config] = {
        "linear": {"factor": 4.0},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 8.0, "truncate": draw.random() < 0.5},
        "longrope": {
            "original_max_position_embeddings": 8,
            **{f"{name}_factor": [round(draw.uniform(1, 4), 2) for _ in range(width // 2)] for name in ("short", "long")},
        },
    }
    return {"rope_parameters": {"rope_type": kind, "rope_theta": draw.choice([300.0, 10000.0]), **own.get(kind, {})}}


def common(draw: random.Random) -> Config:
    heads = draw.choice([2, 4, 6])
    return {
        "num_hidden_layers": 4,
        "hidden_size": 12 * heads // 2,
        "num_attention_heads": heads,
        "intermediate_size": draw.choice([20, 36]),
        "vocab_size": VOCAB,
        "max_position_embeddings": LENGTH,
        "pad_token_id": None,
        "eos_token_id": 3,
        "bos_token_id": 2,
        "tie_word_embeddings": draw.random() < 0.5,
    }


def grouped(draw: random.Random, eps: str = "rms_norm_eps") -> Config:
    given = common(draw)
    heads = given["num_attention_heads"]
    return given | {"num_key_value_heads": draw.choice([n for n in (1, 2, 3, heads) if heads % n == 0]), eps: 1e-5}


def wide(draw: random.Random) -> Config:
    """Heads of a width that is not hidden / heads."""
    return grouped(draw) | {"head_dim": draw.choice([4, 8])}


def drawn_window(draw: random.Random) -> Config:
    return {"sliding_window": draw.choice([None, 3, 5])}


def drawn_layers(draw: random.Random, layers: int = 4) -> Config:
    """A window in no block, in all, or in all but every second."""
    every = draw.choice([None, 0, 2])
    if every is None:
        return {"use_sliding_window": False}
    types = ["full_attention" if every and (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]
    return {"use_sliding_window": True, "sliding_window": 5, "layer_types": types}


def flags(draw: random.Random, *names: str) -> Config:
    return {name: draw.random() < 0.5 for name in names}


def share(draw: random.Random, rope: Config, part: float) -> Config:
    """Of each head only a part turns."""
    rope["rope_parameters"]["partial_rotary_factor"] = part
    return rope


def multipliers(draw: random.Random) -> Config:
    names = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
    return {name: round(draw.uniform(0.2, 3), 3) for name in names}


def gemma(draw: random.Random) -> Config:
    caps = {name: draw.choice([None, 3.0]) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    types = drawn_layers(draw).get("layer_types")
    return caps | {"query_pre_attn_scalar": draw.choice([5, 24]), "sliding_window": 5, "layer_types": types}


def experts(draw: random.Random, count: str, **given: Any) -> Config:
    return {count: draw.choice([4, 6]), "num_experts_per_tok": draw.choice([1, 2, 3]), "experts_implementation": "eager", **given}


def sparse(draw: random.Random) -> Config:
    """Experts in some of the blocks, as Qwen's."""
    blocks = {"decoder_sparse_step": draw.choice([1, 2]), "mlp_only_layers": draw.choice([[], [0, 1]])}
    return experts(draw, "num_experts", moe_intermediate_size=draw.choice([8, 12]), **blocks) | flags(draw, "norm_topk_prob")


def grouped_experts(draw: random.Random) -> Config:
    """Experts in groups, with corrected sigmoids."""
    groups = draw.choice([1, 2, 3])
    own = {"n_group": groups, "topk_group": draw.randint(1, groups), "n_routed_experts": 6, "n_shared_experts": draw.choice([1, 2])}
    own |= {"routed_scaling_factor": draw.choice([1.0, 2.5]), "first_k_dense_replace": draw.choice([0, 1, 2])}
    return experts(draw, "n_routed_experts", moe_intermediate_size=8, num_experts_per_tok=2) | flags(draw, "norm_topk_prob") | own


def latents(draw: random.Random) -> Config:
    """Latent attention, whose values are narrower or wider than the keys without positions."""
    own = {"kv_lora_rank": draw.choice([6, 10]), "q_lora_rank": draw.choice([None, 7]), "rms_norm_eps": 1e-5}
    given = common(draw) | own
    return (
        given
        | {"num_key_value_heads": given["num_attention_heads"], "qk_nope_head_dim": draw.choice([4, 6]), "qk_rope_head_dim": 4}
        | {"v_head_dim": draw.choice([3, 6, 12])}
    )


def scaled(draw: random.Random) -> Config:
    """Positions that are scaled or not, and where YaRN scales them, with the scales of its magnitude that DeepSeek's files have, or none."""
    found = rope(draw, 4, "default yarn")
    scales = draw.choice([{}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.707, "mscale_all_dim": 0.5}])
    found["rope_parameters"] |= scales if found["rope_parameters"]["rope_type"] == "yarn" else {}
    return found


def by_block(draw: random.Random, width: int) -> Config:
    """Other angles in blocks with a window."""
    local = {"rope_type": "default", "rope_theta": draw.choice([100.0, 10000.0])}
    full = rope(draw, width, "default linear")["rope_parameters"]
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


DRAWS: dict[str, Callable[[random.Random], Config]] = {
    "llama": lambda d: (c := wide(d)) | rope(d, c["head_dim"]) | flags(d, "attention_bias", "mlp_bias"),
    "mistral": lambda d: (c := wide(d)) | rope(d, c["head_dim"]) | drawn_window(d),
    "qwen2": lambda d: grouped(d) | rope(d, 6) | drawn_layers(d),
    "qwen3": lambda d: (c := wide(d)) | rope(d, c["head_dim"]) | drawn_layers(d) | flags(d, "attention_bias"),
    "olmo2": lambda d: grouped(d) | rope(d, 6) | flags(d, "attention_bias"),
    "phi3": lambda d: grouped(d) | share(d, rope(d, 4, "default longrope"), 2 / 3) | drawn_window(d),
    "granite": lambda d: grouped(d) | rope(d, 6) | flags(d, "attention_bias", "mlp_bias") | multipliers(d),
    "smollm3": lambda d: grouped(d) | rope(d, 6) | flags(d, "attention_bias", "mlp_bias") | {"no_rope_layer_interval": d.choice([2, 4])},
    "gpt_neox": lambda d: (
        common(d)
        | share(d, rope(d, 2), 1 / 3)
        | flags(d, "attention_bias", "use_parallel_residual")
        | {"hidden_act": d.choice(["gelu", "gelu_new"])}
    ),
    "starcoder2": lambda d: grouped(d, "norm_epsilon") | rope(d, 6) | flags(d, "use_bias") | drawn_window(d),
    "gemma2": lambda d: (c := wide(d)) | rope(d, c["head_dim"]) | flags(d, "attention_bias") | gemma(d),
    "gemma3_text": lambda d: (c := wide(d)) | gemma(d) | by_block(d, c["head_dim"]) | {"attn_logit_softcapping": None},
    "mixtral": lambda d: (c := wide(d)) | rope(d, c["head_dim"]) | drawn_window(d) | experts(d, "num_local_experts"),
    "qwen2_moe": lambda d: grouped(d) | rope(d, 6) | drawn_layers(d) | sparse(d) | {"shared_expert_intermediate_size": d.choice([8, 20])},
    "qwen3_moe": lambda d: (c := wide(d)) | rope(d, c["head_dim"]) | flags(d, "attention_bias") | sparse(d),
    "glm4_moe": lambda d: (
        wide(d) | share(d, rope(d, 4, "default yarn"), 0.5) | flags(d, "attention_bias", "use_qk_norm") | grouped_experts(d)
    ),
    "deepseek_v2": lambda d: (
        latents(d) | scaled(d) | grouped_experts(d) | {"topk_method": d.choice(["greedy", "group_limited_greedy"]), "norm_topk_prob": False}
    ),
    "deepseek_v3": lambda d: (
        latents(d)
        | scaled(d)
        | grouped_experts(d)
        | flags(d, "rope_interleave")
        | {"num_nextn_predict_layers": 0, "first_k_dense_replace": 1}
    ),
}
"""A random config.json of each."""


def made(name: str, seed: int) -> Any:
    """Their network of a random config, all of whose parameters are random numbers of single precision."""
    config = transformers.AutoConfig.for_model(name, **DRAWS[name](random.Random(f"{name} {seed}")), attn_implementation="eager")
    network, generator = transformers.AutoModelForCausalLM.from_config(config).double().eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (*network.parameters(), *corrections(network)):
            parameter.copy_((parameter + 0.3 * torch.randn(parameter.shape, generator=generator)).to(torch.float32))
    return network


def corrections(network: Any) -> list[torch.Tensor]:
    return [value for name, value in network.named_buffers() if name.endswith(CORRECTION)]


def gradients(network: Any, logits: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of the loss of tokens and logits [b, s], by the names of parameters."""
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return dict(in_files((name, parameter.grad) for name, parameter in network.named_parameters()))


def in_files(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by the names that files have for them: a network there has all experts in one, gate and up, too."""
    for name, tensor in tensors:
        place, _, kind = name.rpartition(".")
        names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind if place.endswith(".experts") else "", ())
        for expert, matrix in enumerate(tensor if names else ()):
            yield from ((f"{place}.{expert}.{own}.weight", part) for own, part in zip(names, matrix.chunk(len(names))))
        if not names:
            yield name, tensor


def renamed(name: str) -> str:
    for theirs, ours in RENAMED.items():
        name = name.replace(theirs, ours)
    return name


def compare(name: str, seed: int, folder: Path) -> None:
    with double(name):
        theirs = made(name, seed)
    theirs.save_pretrained(folder / "hf", max_shard_size="20KB")
    assert len(list((folder / "hf").glob("*.safetensors"))) > 1
    model = import_weights(folder / "hf", folder / "c")
    mine, ids = loaded(folder / "c", model, torch.float64), torch.randint(0, VOCAB, (2, LENGTH))
    with double(name):
        said, known = mine(ids.t()).transpose(0, 1), theirs(ids).logits
        torch.testing.assert_close(said, known, rtol=1e-10, atol=1e-10)
        ours, there = gradients(mine, said, ids), gradients(theirs, known, ids)
    for rule in rules(model):
        for name, gradient in zip(rule.theirs, rule.split(ours[rule.ours])) if not rule.ours.endswith(".correction") else ():
            torch.testing.assert_close(gradient, there[renamed(name)], rtol=1e-9, atol=1e-10)
    export_weights(folder / "c", folder / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "again").state_dict()
    assert all(torch.equal(value.float(), again[name]) for name, value in theirs.state_dict().items())
    first, second = (json.loads((folder / place / "config.json").read_text()) for place in ("hf", "again"))
    assert from_config(first) == from_config(second)


@pytest.mark.parametrize("name", DRAWS)
def test_logits_gradients_and_exported_weights_are_theirs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "FILE_BYTES", 20_000)
    torch.manual_seed(1)
    for seed in range(SEEDS):
        compare(name, seed, tmp_path / str(seed))


def test_the_balance_loss_of_a_sequence_is_theirs() -> None:
    """Theirs counts an expert among K times as many choices."""
    logits = torch.randn(12, 6, generator=torch.Generator().manual_seed(3)).requires_grad_()
    choice = choose(logits, None, ExpertsConfig(count=6, active=2))
    load = choice.experts.flatten().bincount(minlength=6) / 24
    ours = 2 * balance_losses(choice.scores, load.expand(12, 6)).mean()
    theirs = importlib.import_module("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func((logits,), 6, 2)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits, retain_graph=True) for loss in (ours, theirs)))
