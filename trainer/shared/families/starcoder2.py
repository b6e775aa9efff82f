"""StarCoder 2: Lozhkov et al. 2024. Grouped queries, LayerNorm, biases, and a window in all blocks."""

from __future__ import annotations

from dataclasses import replace

from trainer.shared.families.family import LLAMA, MATRICES, ConfigKey, Family
from trainer.shared.families.gguf import GgufFormat
from trainer.shared.families.parts import ROPE, biases, one_window

OWN = {"activation", "norm_eps"}
FAMILY = Family(
    name="starcoder2",
    defaults={"norm": "layer", "biases": MATRICES, "activation": "gelu", "tied": True},
    hub=replace(
        LLAMA,
        model_type="starcoder2",
        architecture="Starcoder2ForCausalLM",
        keys=(
            *(key for key in LLAMA.keys if key.ours not in OWN),
            ConfigKey("activation", "hidden_act", words={"gelu": "gelu_pytorch_tanh", "gelu_exact": "gelu"}),
            ConfigKey("norm_eps", "norm_epsilon", default=1e-5, older="layer_norm_epsilon"),
        ),
        parts=(ROPE, biases(True, use_bias=MATRICES), one_window(None)),
        expected={"norm_type": "layer_norm", "mlp_type": "default", "scale_attn_weights": True, "activation_function": "gelu"},
        block={**LLAMA.block, "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
        forms={"attention.qkv": "by kind"},
    ),
    gguf=GgufFormat(architecture="starcoder2"),
)
