"""How our parameters are called and shaped in Hugging Face's GPT-2, LLaMA and BLOOM: one table per family.

Shapes: g key/value heads, q query heads per key/value head, d head size, h hidden, f inner width of the MLP. Our fused matrix of
queries, keys and values is [g, q + 2, d, h]: for each g its queries, one key, one value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.shared.run.schema import ResolvedModelConfig


@dataclass(frozen=True)
class Rule:
    """One of our parameters and the tensors that hold it there. ``{}`` in a name is the number of the block.

    ``split`` makes their tensors from ours; ``join`` is its inverse and needs the shape of ours.
    """

    ours: str
    theirs: tuple[str, ...]
    split: Callable[[Tensor], Sequence[Tensor]]
    join: Callable[[Sequence[Tensor], tuple[int, ...]], Tensor]

    def numbered(self, block: int) -> Rule:
        return Rule(self.ours.format(block), tuple(name.format(block) for name in self.theirs), self.split, self.join)


def same(ours: str, theirs: str) -> Rule:
    """The same numbers in the same order, perhaps in another shape ([g, q + 2, d] there is [g (q + 2) d])."""
    return Rule(ours, (theirs,), lambda w: [w.flatten(0, -2) if w.dim() > 2 else w], lambda parts, shape: parts[0].reshape(shape))


def flat(ours: str, theirs: str) -> Rule:
    """A bias: one dimension there."""
    return Rule(ours, (theirs,), lambda w: [w.flatten()], lambda parts, shape: parts[0].reshape(shape))


def transposed(ours: str, theirs: str) -> Rule:
    """GPT-2 keeps matrices as [in, out]."""
    return Rule(ours, (theirs,), lambda w: [w.t()], lambda parts, shape: parts[0].t().reshape(shape))


def gpt2_qkv(ours: str, theirs: str) -> Rule:
    """All queries, then all keys, then all values: [g, 3, d, ...] here, [..., 3 g d] there."""

    def join(parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        heads, three, head, *inputs = shape
        return parts[0].t().reshape(three, heads, head, *inputs).transpose(0, 1)

    return Rule(ours, (theirs,), lambda w: [w.transpose(0, 1).flatten(0, 2).t()], join)


def llama_qkv(ours: str, theirs: str) -> Rule:
    """Three matrices: ``theirs`` has ``*`` where their letter goes."""

    def split(w: Tensor) -> Sequence[Tensor]:
        return [part.flatten(0, -2) for part in (w[:, :-2], w[:, -2], w[:, -1])]

    def join(parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        groups, members, head, hidden = shape
        query, key, value = parts
        query = query.reshape(groups, members - 2, head, hidden)
        return torch.cat([query, key.reshape(groups, 1, head, hidden), value.reshape(groups, 1, head, hidden)], dim=1)

    return Rule(ours, tuple(theirs.replace("*", letter) for letter in "qkv"), split, join)


def llama_gate(ours: str, gate: str, up: str) -> Rule:
    """[2, f, h] here, two matrices there."""
    return Rule(ours, (gate, up), lambda w: w.unbind(0), lambda parts, shape: torch.stack(list(parts)))


def _norm(ours: str, theirs: str) -> list[Rule]:
    return [flat(f"{ours}.{key}", f"{theirs}.{key}") for key in ("weight", "bias")]


GPT2_ENDS = [
    same("embedding.tokens.weight", "transformer.wte.weight"),
    same("embedding.positions.weight", "transformer.wpe.weight"),
    *_norm("head.norm", "transformer.ln_f"),
]
GPT2_BLOCK = [
    *_norm("blocks.{}.attention_norm", "transformer.h.{}.ln_1"),
    gpt2_qkv("blocks.{}.attention.qkv.weight", "transformer.h.{}.attn.c_attn.weight"),
    gpt2_qkv("blocks.{}.attention.qkv.bias", "transformer.h.{}.attn.c_attn.bias"),
    transposed("blocks.{}.attention.output.weight", "transformer.h.{}.attn.c_proj.weight"),
    flat("blocks.{}.attention.output.bias", "transformer.h.{}.attn.c_proj.bias"),
    *_norm("blocks.{}.mlp_norm", "transformer.h.{}.ln_2"),
    transposed("blocks.{}.mlp.up.weight", "transformer.h.{}.mlp.c_fc.weight"),
    flat("blocks.{}.mlp.up.bias", "transformer.h.{}.mlp.c_fc.bias"),
    transposed("blocks.{}.mlp.down.weight", "transformer.h.{}.mlp.c_proj.weight"),
    flat("blocks.{}.mlp.down.bias", "transformer.h.{}.mlp.c_proj.bias"),
]
LLAMA_ENDS = [
    same("embedding.tokens.weight", "model.embed_tokens.weight"),
    flat("head.norm.weight", "model.norm.weight"),
]
LLAMA_BLOCK = [
    flat("blocks.{}.attention_norm.weight", "model.layers.{}.input_layernorm.weight"),
    llama_qkv("blocks.{}.attention.qkv.weight", "model.layers.{}.self_attn.*_proj.weight"),
    same("blocks.{}.attention.output.weight", "model.layers.{}.self_attn.o_proj.weight"),
    flat("blocks.{}.mlp_norm.weight", "model.layers.{}.post_attention_layernorm.weight"),
    llama_gate("blocks.{}.mlp.up.weight", "model.layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.up_proj.weight"),
    same("blocks.{}.mlp.down.weight", "model.layers.{}.mlp.down_proj.weight"),
]
BLOOM_ENDS = [
    same("embedding.tokens.weight", "transformer.word_embeddings.weight"),
    *_norm("embedding.norm", "transformer.word_embeddings_layernorm"),
    *_norm("head.norm", "transformer.ln_f"),
]
BLOOM_BLOCK = [
    *_norm("blocks.{}.attention_norm", "transformer.h.{}.input_layernorm"),
    same("blocks.{}.attention.qkv.weight", "transformer.h.{}.self_attention.query_key_value.weight"),
    flat("blocks.{}.attention.qkv.bias", "transformer.h.{}.self_attention.query_key_value.bias"),
    same("blocks.{}.attention.output.weight", "transformer.h.{}.self_attention.dense.weight"),
    flat("blocks.{}.attention.output.bias", "transformer.h.{}.self_attention.dense.bias"),
    *_norm("blocks.{}.mlp_norm", "transformer.h.{}.post_attention_layernorm"),
    same("blocks.{}.mlp.up.weight", "transformer.h.{}.mlp.dense_h_to_4h.weight"),
    flat("blocks.{}.mlp.up.bias", "transformer.h.{}.mlp.dense_h_to_4h.bias"),
    same("blocks.{}.mlp.down.weight", "transformer.h.{}.mlp.dense_4h_to_h.weight"),
    flat("blocks.{}.mlp.down.bias", "transformer.h.{}.mlp.dense_4h_to_h.bias"),
]
TABLES = {"gpt": (GPT2_ENDS, GPT2_BLOCK), "llama": (LLAMA_ENDS, LLAMA_BLOCK), "bloom": (BLOOM_ENDS, BLOOM_BLOCK)}


def rules(model: ResolvedModelConfig) -> Iterator[Rule]:
    """The rule of every parameter of ``model``, in the order of the network, ends first."""
    ends, block = TABLES[model.family]
    yield from ends
    if not model.tied:
        yield same("head.output.weight", "lm_head.weight")
    for i in range(model.layers):
        yield from (rule.numbered(i) for rule in block)
