"""What LoRA added is, in ``peft``, the same function with the same gradients."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tuning.test_checkpoints import opened
from tuning.test_tuned_layouts import engine_of

from tests.farm import Farm
from tests.huggingface import MARKS, peft, transformers
from tests.small_runs import small
from trainer.convert import export_adapter, export_weights, import_adapter
from trainer.shared.run.errors import ConfigError

pytestmark = MARKS

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {"family": "llama", "kv_heads": 2, "tied": False},
    **{name: {"family": name, "kv_heads": 2} for name in ("qwen2", "phi3", "starcoder2")},
}
FEW = ["llama", *(pytest.param(name, marks=pytest.mark.campaign("draws")) for name in ("gpt", "qwen2", "phi3", "starcoder2"))]


@pytest.mark.parametrize("family", FEW)
def test_peft_computes_our_logits_and_gradients(farm: Farm, tmp_path: Path, family: str) -> None:
    """In fp32, after steps under tensor parallelism; the norm of the gradients of all A and B, of which peft has several where ours is one."""
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    common: dict[str, Any] = {"model": MODELS[family], "precision": "fp32", "tensor": 2}
    farm.train(small(run={"checkpoint": {"every": 3, "dir": str(base)}}, **common), 2).checked()
    tune = {"method": "lora", "rank": 4, "alpha": 8.0, "base": str(base)}
    config = small(steps=6, run={"checkpoint": {"every": 5, "dir": str(tuned)}}, **common) | {"tune": tune}
    result = farm.train(config, 2).checked().result
    earlier = min(tuned.glob("step-*"))  # five steps: the sixth loss is of these weights
    export_weights(base, tmp_path / "hf")
    export_adapter(earlier, tmp_path / "adapter")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter", is_trainable=True)
    rows = torch.from_numpy(engine_of(**small(model=MODELS[family])).batches.dataset.batch(20, 4))
    logits = model(rows[:, :-1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    assert loss.item() == pytest.approx(result["losses"][5], rel=1e-6)
    loss.backward()
    own = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    # ours has one A beside several matrices: its gradient is the sum of theirs
    shared: dict[str, torch.Tensor] = {}
    for name, gradient in own.items():
        assert gradient is not None
        shared[_ours(name)] = shared.get(_ours(name), torch.zeros(())) + gradient
    norm = torch.stack([g.norm() for g in shared.values()]).norm()
    assert norm.item() == pytest.approx(result["grad_norms"][5], rel=1e-5)


def _ours(name: str) -> str:
    """The factor of ours that a factor of theirs is a part of."""
    if "lora_A" not in name:
        return name
    for letter in ("q_proj", "k_proj", "v_proj"):
        name = name.replace(letter, "qkv")
    return name.replace("gate_proj", "up_proj")


def test_other_methods_have_no_such_form(farm: Farm, tmp_path: Path) -> None:
    folder = str(tmp_path / "tuned")
    farm.train(small(run={"checkpoint": {"every": 3, "dir": folder}}) | {"tune": {"method": "ia3"}}, 1).checked()
    with pytest.raises(ConfigError, match="only lora has a form of its own there"):
        export_adapter(Path(folder), tmp_path / "adapter")


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_folder_that_peft_saved_is_the_same_function_here(farm: Farm, tmp_path: Path, family: str) -> None:
    """With a factor A of each matrix' own, and some matrices left out; and what is exported comes back as it was."""
    base = tmp_path / "base"
    farm.train(small(model=MODELS[family], precision="fp32", run={"checkpoint": {"every": 3, "dir": str(base)}}), 1).checked()
    export_weights(base, tmp_path / "hf")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    targets = {"gpt": ["c_attn", "mlp.c_proj"], "llama": ["q_proj", "v_proj", "gate_proj", "down_proj"]}[family]
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(plain, settings)
    theirs.save_pretrained(tmp_path / "theirs")
    import_adapter(tmp_path / "theirs", tmp_path / "ours", base)
    (base / "generation_config.json").write_text('{"eos_token_id": 7, "bos_token_id": 5}')
    export_weights(tmp_path / "ours", tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    tokens = torch.randint(101, (2, 16))
    torch.testing.assert_close(merged(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-5)
    assert (merged.config.eos_token_id, merged.config.bos_token_id) == (7, 5), "it ends a text as its base"
    export_adapter(tmp_path / "ours", tmp_path / "again")
    import_adapter(tmp_path / "again", tmp_path / "back", base)
    first, second = (opened(tmp_path / name, merge=False).added for name in ("ours", "back"))
    assert first.shapes == second.shapes


@pytest.fixture(scope="module")
def folder(farm: Farm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base's checkpoints."""
    made = tmp_path_factory.mktemp("base")
    farm.train(small(run={"checkpoint": {"every": 3, "dir": str(made)}}), 1).checked()
    return made


def test_an_adapter_of_another_base_or_kind_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    plain = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=3, n_embd=32, n_head=4, vocab_size=101, n_positions=16))
    settings = {"target_modules": ["c_attn"], "r": 3, "task_type": "CAUSAL_LM"}
    for name, change, words in (
        ("deeper", {}, "no place for transformer.h.2.attn.c_attn"),
        ("dora", {"use_dora": True}, "use_dora=True cannot be imported"),
    ):
        peft.get_peft_model(plain, peft.LoraConfig(**settings, **change)).save_pretrained(tmp_path / name)
        with pytest.raises(ConfigError) as error:
            import_adapter(tmp_path / name, tmp_path / "ours", folder)
        assert words in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="cannot import"):
        import_adapter(tmp_path, tmp_path / "ours", folder)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="is not a JSON object"):
        import_adapter(tmp_path, tmp_path / "ours", folder)


def test_factors_of_other_widths_or_ranks_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    """An adapter of a wider base, one whose r is not that of its factors, and one that has lost a factor."""
    settings = peft.LoraConfig(r=3, target_modules=["c_attn"], task_type="CAUSAL_LM")
    for name, width in (("fits", 32), ("wider", 64), ("rank", 32), ("lost", 32)):
        plain = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=width, n_head=4, vocab_size=101, n_positions=16))
        peft.get_peft_model(plain, settings).save_pretrained(tmp_path / name)
    written = tmp_path / "rank" / "adapter_config.json"
    written.write_text(json.dumps(json.loads(written.read_text()) | {"r": 2}))
    weights = tmp_path / "lost" / "adapter_model.safetensors"
    save_file({name: value for name, value in load_file(weights).items() if "h.1.attn.c_attn.lora_B" not in name}, weights)
    for name, words in (
        ("wider", r"h.0.attn.c_attn are A [3, 64] and B [192, 3], and this base takes [3, 32] and [96, 3] (r=3)"),
        ("rank", r"h.0.attn.c_attn are A [3, 32] and B [96, 3], and this base takes [2, 32] and [96, 2] (r=2)"),
        ("lost", r"h.1.attn.c_attn are A [3, 32] and B None, and this base takes"),
    ):
        with pytest.raises(ConfigError) as error:
            import_adapter(tmp_path / name, tmp_path / "ours", folder)
        assert words in str(error.value) and "\n" not in str(error.value)
    import_adapter(tmp_path / "fits", tmp_path / "ours", folder)


@pytest.mark.parametrize("alpha", [-1, 0, math.nan, math.inf])
def test_a_scale_that_tune_alpha_refuses_is_not_imported(folder: Path, tmp_path: Path, alpha: float) -> None:
    plain = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=101, n_positions=16))
    peft.get_peft_model(plain, peft.LoraConfig(r=3, target_modules=["c_attn"])).save_pretrained(tmp_path / "theirs")
    written = tmp_path / "theirs" / "adapter_config.json"
    written.write_text(json.dumps(json.loads(written.read_text()) | {"lora_alpha": alpha}))
    with pytest.raises(ConfigError, match=r"lora_alpha=\S+ cannot be imported; the product is scaled by a number above 0"):
        import_adapter(tmp_path / "theirs", tmp_path / "ours", folder)
    assert not (tmp_path / "ours").exists()


def test_what_a_tuning_added_is_no_base_of_an_adapter(farm: Farm, tmp_path: Path) -> None:
    base, tuned = ({"run": {"checkpoint": {"every": 3, "dir": str(tmp_path / name)}}} for name in ("base", "tuned"))
    farm.train(small(**base), 1).checked()
    farm.train(small(**tuned) | {"tune": {"method": "lora", "rank": 3, "base": str(tmp_path / "base")}}, 1).checked()
    export_adapter(tmp_path / "tuned", tmp_path / "theirs")
    with pytest.raises(ConfigError, match=r"tuned holds what a tuning added, which cannot be a base; give the one it was tuned from"):
        import_adapter(tmp_path / "theirs", tmp_path / "back", tmp_path / "tuned")
    assert not (tmp_path / "back").exists()
