"""Weights of other programs."""

from __future__ import annotations

from tests.planted.defect import Defect

DEFECTS = [
    Defect(
        "keys and values are exported in each other's place",
        "trainer/convert/rules.py",
        "[w[:, :-2], w[:, -2], w[:, -1]]",
        "[w[:, :-2], w[:, -1], w[:, -2]]",
        "tests/convert/test_logits.py",
    ),
    Defect(
        "imported queries, keys and values are split by head first",
        "trainer/shared/families/gpt.py",
        'forms={"attention.qkv": "by kind"}',
        "forms={}",
        "tests/convert/test_logits.py",
    ),
    Defect(
        "rotary pairs of a GGUF file are those of Hugging Face",
        "trainer/convert/gguf.py",
        "return tensor.reshape(heads, *pairs, -1).transpose(1, 2).reshape(tensor.shape)",
        "return tensor.reshape(tensor.shape)",
        "tests/convert/test_gguf.py",
    ),
    Defect(
        "norms of 1 + weight stand in a file without the 1",
        "trainer/convert/gguf.py",
        "return tensor.float() - 1 if back else tensor.float() + 1",
        "return tensor.float()",
        "tests/convert/test_gguf.py",
    ),
    Defect(
        "the stretch of rotary positions is read from the first pair alone",
        "trainer/shared/records/rope_factors.py",
        'found |= {"original": round(slope * reach * 2 * math.pi), "high": float(f"{1 + reach:.4g}")}',
        'found |= {"original": 8192}',
        "tests/convert/test_understood.py",
    ),
    Defect(
        "blocks of a decoder are numbered behind those of its encoder in a file",
        "trainer/convert/rules.py",
        "{block - model.encoder_layers}.",
        "{block}.",
        "tests/convert/test_t5.py -k random_networks",
    ),
    Defect(
        "a T5 file whose head is not scaled has the embedding for a head",
        "trainer/shared/families/t5.py",
        'bool(config.get("scale_decoder_outputs", tied is None or tied))',
        "tied is None or bool(tied)",
        "tests/convert/test_t5.py -k random_networks",
    ),
    Defect(
        "a file of DeepSeek's says a key's length without that of its position",
        "trainer/shared/families/deepseek_v2.py",
        '"attention.key_length": lambda model: model["head_width"] + model["latent.rotary"],',
        '"attention.key_length": lambda model: model["head_width"],',
        "tests/convert/test_gguf.py",
    ),
    Defect(
        "scores of a stretched DeepSeek from a file are scaled by YaRN's factor alone, not by its square",
        "trainer/shared/families/deepseek_v2.py",
        '{"attention_scale": magnitude**2 / math.sqrt(width), "rope.magnitude": 1.0}',
        '{"attention_scale": magnitude / math.sqrt(width), "rope.magnitude": 1.0}',
        "tests/convert/test_gguf.py",
    ),
]
