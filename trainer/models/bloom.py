"""BLOOM: linear attention biases instead of position vectors, a norm right after the embedding (Le Scao et al. 2022)."""

from __future__ import annotations

from torch import Tensor, nn

from trainer.models.attention import Attention, AttentionCore
from trainer.models.gpt import Head
from trainer.models.layers import MLP, Dropout, LayerNorm, TokenEmbedding, residual_std
from trainer.spec import ModelConfig

__all__ = ["Block", "Embedding", "Head"]


class Embedding(nn.Module):
    """Tokens [s, b] -> [s, b, h]."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.tokens = TokenEmbedding(c.vocab, c.hidden, c.init_std)
        self.norm = LayerNorm(c.hidden, c.norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.tokens(tokens))


class Block(nn.Module):
    """[s, b, h] -> [s, b, h]."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        narrow = residual_std(c.init_std, c.layers)
        core = AttentionCore(c.heads, c.attention == "fused", c.dropout, alibi=True)
        self.attention_norm = LayerNorm(c.hidden, c.norm_eps)
        self.attention = Attention(c.hidden, c.heads, c.kv_heads, c.init_std, narrow, bias=True, core=core)
        self.attention_dropout = Dropout(c.dropout)
        self.mlp_norm = LayerNorm(c.hidden, c.norm_eps)
        self.mlp = MLP(c.hidden, c.ffn, c.activation, c.init_std, narrow, bias=True)
        self.mlp_dropout = Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)))
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))
