"""LLaMA: rotary positions, RMSNorm, SwiGLU, grouped queries, no biases, no dropout of its own (Touvron et al. 2023)."""

from __future__ import annotations

from torch import Tensor, nn

from trainer.models.attention import Attention, AttentionCore, Rotary
from trainer.models.layers import MLP, Dropout, Linear, RMSNorm, TokenEmbedding, residual_std
from trainer.spec import ModelConfig


class Embedding(nn.Module):
    """Tokens [s, b] -> [s, b, h]. Positions enter in the attention."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.tokens = TokenEmbedding(c.vocab, c.hidden, c.init_std)
        self.dropout = Dropout(c.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.tokens(tokens))


class Block(nn.Module):
    """[s, b, h] -> [s, b, h]."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        narrow = residual_std(c.init_std, c.layers)
        core = AttentionCore(c.heads, c.attention == "fused", c.dropout)
        rotary = Rotary(c.hidden // c.heads, c.rope_theta)
        self.attention_norm = RMSNorm(c.hidden, c.norm_eps)
        self.attention = Attention(c.hidden, c.heads, c.kv_heads, c.init_std, narrow, bias=False, core=core, rotary=rotary)
        self.attention_dropout = Dropout(c.dropout)
        self.mlp_norm = RMSNorm(c.hidden, c.norm_eps)
        self.mlp = MLP(c.hidden, c.ffn, c.activation, c.init_std, narrow, bias=False)
        self.mlp_dropout = Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)))
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))


class Head(nn.Module):
    """[s, b, h] -> logits [s, b, V]."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.norm = RMSNorm(c.hidden, c.norm_eps)
        self.output = Linear(c.hidden, (c.vocab,), c.init_std, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))
