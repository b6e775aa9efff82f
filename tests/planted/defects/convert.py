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
]
