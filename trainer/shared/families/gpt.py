"""GPT-2 and GPT-3: Radford et al. 2019, Brown et al. 2020.

Published models: GPT-3 (table 2.1) up to 13B and 175B, with the heads that the NeMo launcher uses; the NeMo launcher's 5B, 20B and 40B;
76B, 310B, 530B and 1T from Megatron-LM (Narayanan et al. 2021, table 1; Korthikanti et al. 2022, table 3), their learning rates from the
NeMo tool's table.
"""

from __future__ import annotations

from trainer.shared.families.family import MATRICES, ConfigKey, Family, FamilyDefaults, HubFormat, ReferenceModel
from trainer.shared.families.gguf import GgufFormat

ACTIVATIONS = {"gelu": "gelu_new", "gelu_exact": "gelu", "squared_relu": "relu2", "relu": "relu"}
"""``gelu`` is its tanh form, ``squared_relu`` Primer's max(x, 0)^2."""

FAMILY = Family(
    name="gpt",
    title="gpt (GPT-2/3)",
    order=0,
    defaults={"positions": "learned", "norm": "layer", "biases": MATRICES, "activation": "gelu", "tied": True},
    hub=HubFormat(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        keys=(
            *(ConfigKey("dropout", name, read=False) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")),
            ConfigKey("layers", "n_layer"),
            ConfigKey("hidden", "n_embd"),
            ConfigKey("heads", "n_head"),
            ConfigKey("ffn", "n_inner", default=None),
            ConfigKey("seq", "n_positions"),
            ConfigKey("activation", "activation_function", words=ACTIVATIONS, synonyms={"gelu_pytorch_tanh": "gelu"}),
            ConfigKey("norm_eps", "layer_norm_epsilon", default=1e-5),
        ),
        expected={
            "attention_head_type": "multihead",
            "scale_attn_by_inverse_layer_idx": False,
            "scale_attn_weights": True,
            "add_cross_attention": False,
        },
        root="transformer.",
        ends={"embedding.tokens": "wte", "embedding.positions": "wpe", "head.norm": "ln_f"},
        blocks="h",
        block={
            "attention_norm": "ln_1",
            "attention.qkv": "attn.c_attn",
            "attention.output": "attn.c_proj",
            "mlp_norm": "ln_2",
            "mlp.up": "mlp.c_fc",
            "mlp.down": "mlp.c_proj",
        },
        forms={"attention.qkv": "by kind"},
        inputs_first=True,
        computed=(".attn.bias", ".attn.masked_bias"),
    ),
    gguf=GgufFormat(architecture="gpt2", arranged=dict.fromkeys(("attn.c_attn.weight", "c_proj.weight", "c_fc.weight"), "transposed")),
    published=FamilyDefaults(
        models=(
            ReferenceModel("126M", 12, 768, 12, 6e-4),
            ReferenceModel("350M", 24, 1024, 16, 3e-4),
            ReferenceModel("760M", 24, 1536, 16, 2.5e-4),
            ReferenceModel("1.3B", 24, 2048, 16, 2e-4),
            ReferenceModel("2.7B", 32, 2560, 32, 1.6e-4),
            ReferenceModel("5B", 24, 4096, 32, 1.2e-4),
            ReferenceModel("6.7B", 32, 4096, 32, 1.2e-4),
            ReferenceModel("13B", 40, 5120, 40, 1e-4),
            ReferenceModel("20B", 44, 6144, 48, 1e-4),
            ReferenceModel("40B", 48, 8192, 64, 0.8e-4),
            ReferenceModel("76B", 60, 10240, 80, 0.7e-4),
            ReferenceModel("175B", 96, 12288, 96, 0.6e-4),
            ReferenceModel("310B", 96, 16384, 128, 0.5e-4),
            ReferenceModel("530B", 105, 20480, 128, 0.4e-4),
            ReferenceModel("1T", 128, 25600, 160, 0.3e-4),
        ),
        vocab=51200,
        dropout=0.1,
        batch_tokens=((0.76e9, 256 * 2048), (2e9, 1024 * 2048), (5e9, 2048 * 2048)),  # NeMo tool, a size inside each of its bins
        constant_end=0.166,  # NeMo tool
    ),
)
