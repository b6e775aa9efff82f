"""A model in numbers: widths, parameters and floating-point operations of every family.

A ``Shape`` is ``ModelConfig`` seen by the cost model: every derived value is filled in. Models that the trainer does not
build, such as mixtures of experts, can be described too. Every number may be a numpy array (models,), so that many
models are counted at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from trainer.shared.families import block
from trainer.shared.families.block import HeadNorm, Matrix, ResidualBranch
from trainer.shared.families.family import MATRICES
from trainer.shared.families.registry import FAMILIES
from trainer.shared.run import flops
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import NORM_VECTORS, ModelConfig, TuneConfig
from trainer.shared.run.tuning import added_parameters

Array = float | np.ndarray
"""One number for all layouts, or an array (layouts,) with one number per layout; they broadcast against each other."""

SIZES = ("layers", "hidden", "heads", "kv_heads", "head_width", "ffn", "vocab", "seq")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP."""

    count: Array  # experts of a block, over all expert-parallel ranks
    active: Array  # experts that each token visits
    ffn: Array  # inner width of one expert
    shared_ffn: Array = 0  # inner width of the experts that every token visits
    dense_layers: Array = 0  # leading blocks with an ordinary MLP
    every: Array = 1  # only each so many-th block has experts
    shared_gate: bool = False  # a vector that weighs the shared ones
    router_bias: bool = False
    imbalance: Array = 1.0  # tokens of the busiest rank / their mean


@dataclass(frozen=True)
class LatentAttention:
    """Queries, keys and values made from low-rank latents (multi-head latent attention)."""

    query_rank: Array  # 0: queries are made from the hidden state
    kv_rank: Array
    rotary: Array = 64  # further width of a query/key head that carries the position
    value: Array | None = None  # width of a value; None: that of a head


CHOSEN = ("activation", "biases", "norm", "norm_at", "positions", "qk_norm", "residual")
"""Keys of a model by which ``family_traits`` differ within a family."""


def family_traits(model: ModelConfig) -> dict[str, Any]:
    """The fields of a ``Shape`` that family, stacks and ``CHOSEN`` decide, where a table knows no more."""
    return _traits(resolve_model(model))


def _traits(model: ResolvedModelConfig) -> dict[str, Any]:
    family = FAMILIES[model.family]
    written = _share(model.layers - model.encoder_layers, model.layers) if model.encoder_layers else 0
    return {
        "gated": model.gated,
        "biases": tuple(model.biases),
        "scale_only_norm": NORM_VECTORS[model.norm] == 1,
        "branches": block.branches(model.norm_at, model.residual),
        "qk_norm": model.qk_norm,
        "positions": model.seq + model.decoder_seq + family.further_positions if model.positions == "learned" else 0,
        "embedding_norm": family.embedding_norm,
        "rotary": model.positions == "rotary",
        "linear_biases": model.positions == "alibi",
        "sinks": family.attention_sinks,
        "buckets": model.relative_buckets if model.positions == "relative" else 0,
        "encoder_layers": model.encoder_layers,
        "decoder_seq": model.decoder_seq,
        "crossed": written,
        "crossing": model.seq if model.encoder_layers else 0,
    }


def _share(part: int, whole: int) -> float:
    return part / whole


@dataclass(frozen=True)
class Shape:
    """Widths of one model. ``layers`` counts the blocks that a token passes through."""

    layers: Array
    hidden: Array
    heads: Array
    kv_heads: Array
    head_width: Array
    ffn: Array
    vocab: Array
    seq: Array
    gated: bool = False  # SwiGLU: three matrices in the MLP instead of two
    tied: bool = True  # input embedding and head share their matrix
    biases: tuple[str, ...] = MATRICES  # matrices that have one
    branches: tuple[ResidualBranch, ...] = block.branches("before", "sequential")  # of a block, but for attention to an encoder's output
    qk_norm: str = "none"  # of queries and keys: none, of each head, of the whole width
    window: Array = 0  # positions that attention looks back; 0: all
    full_every: Array = 0  # each so many-th block does in spite of that; 0: none
    capped: bool = False  # scores go through a tanh, which no flash kernel but the newest has
    sinks: bool = False  # a further score of each head
    predicted_tokens: Array = 0  # further tokens that modules at the end predict
    scale_only_norm: bool = False  # RMSNorm: no shift
    positions: Array = 0  # learned position embeddings
    embedding_norm: bool = False  # BLOOM normalises the embedding
    rotary: bool = False
    linear_biases: bool = False  # ALiBi
    dropout: bool = False
    text: Array = 0  # tokens of one of the texts that a row holds, of which an attention kernel sees each alone; 0: a row is one text
    fused_attention: bool = True  # scaled_dot_product_attention or a flash kernel, not matmul-softmax-matmul
    frozen: bool = False  # only small adapters are trained (LoRA): no weight gradients, no states of the matrices
    adapted: tuple[str, ...] = ()  # products of a block beside which a low-rank one is trained (LoRA): it needs their inputs
    rank: Array = 0  # of those
    added: Array = 0  # parameters that are trained where the others are frozen
    experts: Experts | None = None
    latent: LatentAttention | None = None
    encoder_layers: Array = 0  # of ``layers``, those of an encoder, which reads ``seq`` tokens; 0: one stack
    decoder_seq: Array = 0  # tokens of the other layers
    crossed: Array = 0  # share of the blocks that attend to an encoder's output as well
    crossing: Array = 0  # tokens of that
    bidirectional: bool = False  # a token sees those behind it, too
    buckets: Array = 0  # rows of the table of biases by distance, one for each stack; 0: scores have none
    inner_dropout: bool = False  # T5 drops between the matrices of an MLP, where a trainer does so, too

    @classmethod
    def of(cls, model: ModelConfig, tune: TuneConfig | None = None) -> Shape:
        """The shape of a configured model (derived values are filled in), and its trained part."""
        model = resolve_model(model)
        return cls(
            **{name: getattr(model, name) for name in SIZES},
            tied=bool(model.tied),
            **_traits(model),
            window=model.window or 0,
            full_every=model.full_every,
            capped=model.score_cap is not None,
            predicted_tokens=model.predicted_tokens,
            experts=_experts(model),
            latent=_latent(model),
            dropout=model.dropout > 0,
            inner_dropout=model.dropout > 0 and model.encoder_layers > 0,
            fused_attention=model.attention == "fused",
            frozen=tune is not None and tune.method != "full",
            adapted=tuple(tune.targets) if tune is not None and tune.method == "lora" else (),
            rank=0 if tune is None else tune.rank,
            added=0 if tune is None else added_parameters(model, tune),
        )

    @property
    def stacks(self) -> tuple[Shape, ...]:
        """The encoder and the decoder by themselves; a network of one stack is its own."""
        if not np.any(self.encoder_layers):
            return (self,)
        read = replace(self, layers=self.encoder_layers, encoder_layers=0, crossed=0, crossing=0, bidirectional=True)
        layers = self.layers - self.encoder_layers
        return read, replace(self, layers=layers, encoder_layers=0, seq=self.decoder_seq, crossed=1)

    @property
    def trained(self) -> Array:
        """Share of the parameters that have gradients and optimizer states."""
        return self.added / self.parameters if self.frozen else 1.0

    @property
    def low_rank_parameters(self) -> Array:
        """Parameters of the products added to frozen matrices: r (in + out) each."""
        ends = {matrix.name: matrix.inputs + matrix.outputs for matrix in (*block.attention(self), *block.mlp(self))}
        return self.layers * self.rank * sum(ends[name] for name in self.adapted)

    @property
    def mlp_matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def query_width(self) -> Array:
        return self.heads * self.head_width

    @property
    def kv_width(self) -> Array:
        """Width of keys, and of values."""
        return self.kv_heads * self.head_width

    @property
    def norm_parameters(self) -> Array:
        return self.hidden * (1 if self.scale_only_norm else 2)

    @property
    def value_width(self) -> Array:
        """Width of what attention gives to its output matrix."""
        return self.query_width if self.latent is None or self.latent.value is None else self.heads * self.latent.value

    @property
    def turned_width(self) -> Array:
        """Width of the queries that scores are made of, those of their positions among them."""
        return self.query_width if self.latent is None else self.query_width + self.heads * self.latent.rotary

    @property
    def key_width(self) -> Array:
        """Width of the keys that scores are made of. Those made from a latent are as many as the queries."""
        return self.kv_width if self.latent is None else self.turned_width

    @property
    def read_width(self) -> Array:
        """Width of the values that scores weigh."""
        return self.kv_width if self.latent is None else self.value_width

    @property
    def latent_parameters(self) -> Array:
        """Matrices that make latents, which every tensor rank has whole."""
        return block.whole_weights(self.attention)

    @property
    def cached_heads(self) -> Array:
        """Key/value heads that a cache has: of latents one for all queries (arXiv 2405.04434, section 2.1.2)."""
        return self.kv_heads if self.latent is None else 1

    @property
    def cached_width(self) -> Array:
        """Width of what a cache has of a token for each of those heads: a key and a value, or a latent and the key of its position."""
        return 2 * self.head_width if self.latent is None else self.latent.kv_rank + self.latent.rotary

    @cached_property
    def attention(self) -> list[Matrix]:
        """Matrices of a block's self-attention."""
        return block.attention(self, self.latent)

    @cached_property
    def head_norms(self) -> list[HeadNorm]:
        """Norms of queries and keys, or of the latents that they are made from."""
        return block.head_norms(self, self.qk_norm, self.latent)

    @cached_property
    def routed(self) -> list[Matrix]:
        """Matrices of the experts that tokens are sent to; none of a dense model."""
        return [] if self.experts is None else block.routed(self, self.experts, self.experts.ffn)

    @property
    def attention_parameters(self) -> Array:
        """Matrices of a block's attention: queries, keys, values, output; attention to an encoder's output has as many once more."""
        return (1 + self.crossed) * block.weights(self.attention)

    @property
    def mlp_parameters(self) -> Array:
        """Matrices of an ordinary MLP."""
        return block.weights(block.mlp(self))

    @property
    def expert_parameters(self) -> Array:
        """Matrices of all routed experts of one block; 0 for a dense model."""
        return block.weights(self.routed)

    @property
    def shared_mlp_parameters(self) -> Array:
        """Matrices of an expert block's MLP that are not routed: the shared experts and the router."""
        e = self.experts
        return 0 if e is None else block.weights([*block.shared(self, e), block.router(self, e)])

    @property
    def output_biases(self) -> int:
        """Matrices of a block that write to the residual stream with a bias."""
        return len({"output", "down"}.intersection(self.biases))

    @property
    def block_norms(self) -> Array:
        """Norms of the hidden state in a block."""
        return block.norms(self.branches) + self.crossed

    @property
    def shared_norm_inputs(self) -> int:
        """Norms whose input another one before them reads, too."""
        return block.norms(self.branches) - block.norm_inputs(self.branches)

    @property
    def unread_norms(self) -> int:
        """Norms beyond the tensors that products read: their results are added to the residual stream."""
        return block.norms(self.branches) - block.product_inputs(self.branches)

    @property
    def added_to_residual(self) -> Array:
        """Results that a block adds to the residual stream."""
        return len(self.branches) + self.crossed

    @property
    def small_parameters(self) -> Array:
        """Biases, norms and sinks of one block, but for those of its experts."""
        own, crossing = ([*self.attention, *block.mlp(self)], block.crossing(self))
        biases = block.biases(own, self.biases) + self.crossed * block.biases(crossing, self.biases)
        return biases + self.block_norms * self.norm_parameters + self.head_norm_parameters + self.sinks * self.heads

    @property
    def head_norm_parameters(self) -> Array:
        """Norms of queries and keys, or of their latents."""
        shift = 0 if self.scale_only_norm else 1
        return sum(each.weights * (1 + shift * each.shifted) for each in self.head_norms)

    @property
    def expert_biases(self) -> Array:
        """Biases of a block with experts beyond those of one with an MLP, averaged over all blocks."""
        if self.experts is None:
            return 0
        more = block.biases(self.routed, self.biases) - block.biases(block.mlp(self), self.biases)
        more = more + self.experts.count * self.experts.router_bias
        return more * self.expert_layers / self.layers

    @property
    def expert_layers(self) -> Array:
        """Blocks with experts."""
        if self.experts is None:
            return 0
        return self.layers // self.experts.every - self.experts.dense_layers // self.experts.every

    @property
    def full_attention(self) -> Array:
        """Share of the blocks whose queries see all keys before them."""
        if not np.any(self.window):
            return 1.0
        full = np.where(np.asarray(self.full_every) > 0, self.layers // np.maximum(self.full_every, 1), 0) / self.layers
        return np.where(np.asarray(self.window) > 0, full, 1.0)

    @property
    def attended(self) -> Array:
        """Keys that a query sees, the mean of all blocks and queries, counted as the whole square is."""
        if not np.any(self.window):
            return self.seq
        near = flops.seen_keys(self.seq, np.where(np.asarray(self.window) > 0, self.window, self.seq))
        return self.full_attention * self.seq + (1 - self.full_attention) * near

    @property
    def block_parameters(self) -> Array:
        """Parameters of one block, averaged over the blocks where they differ."""
        sparse = self.expert_layers / self.layers
        mlp = (1 - sparse) * self.mlp_parameters + sparse * (self.expert_parameters + self.shared_mlp_parameters)
        return self.attention_parameters + mlp + self.small_parameters + self.expert_biases

    @property
    def embedding_parameters(self) -> Array:
        """Token and position embeddings and their norm."""
        vectors = (self.vocab + self.positions) * self.hidden + (self.norm_parameters if self.embedding_norm else 0)
        return vectors + 2 * self.buckets * self.heads

    @property
    def parameters(self) -> Array:
        """All parameters: V h + positions + L blocks + final norm (+ V h untied). Each further token that is predicted has a block, a
        projection (2 h x h), norms of its two inputs and one before the head."""
        head = (0 if self.tied else self.vocab * self.hidden) + ("head" in self.biases) * self.vocab
        predictor = self.block_parameters + 2 * self.hidden**2 + 3 * self.norm_parameters
        blocks = self.layers * self.block_parameters + self.predicted_tokens * predictor
        ends = len(self.stacks) * self.norm_parameters
        return self.embedding_parameters + blocks + ends + head

    @property
    def active_matrix_parameters(self) -> Array:
        """Matrix parameters that one token is multiplied with: the input embedding left out, the head counted once, routed experts
        only as far as a token visits them."""
        sparse = self.expert_layers / self.layers
        mlp = (1 - sparse) * self.mlp_parameters
        if self.experts is not None:
            mlp = mlp + sparse * (block.visited_weights(self.routed) + self.shared_mlp_parameters)
        each, head = self.attention_parameters + mlp, self.vocab * self.hidden
        return self.layers * each + head + self.predicted_tokens * (each + 2 * self.hidden**2 + head)

    def attention_flops(self, causal: bool = False) -> Array:
        """Forward FLOPs of the attention core of all blocks for one sequence: 4 s^2 per query width, half of it below the diagonal."""
        if len(self.stacks) > 1:
            return sum(stack.attention_flops(causal) for stack in self.stacks)
        width = self.query_width
        if self.latent is not None:  # queries and keys are wider than values
            width = (width + self.heads * self.latent.rotary + self.value_width) / 2
        blocks = self.layers + self.predicted_tokens
        own = flops.attention_core_flops(self.seq, width, causal and not self.bidirectional) * (self.attended / self.seq)
        return blocks * (own + 4 * self.seq * self.crossing * width)

    def forward_flops(self, causal: bool = False) -> Array:
        """Forward FLOPs of one sequence."""
        head = self.vocab * self.hidden
        if len(self.stacks) > 1:
            return sum(stack.forward_flops(causal) for stack in self.stacks) - flops.matrix_flops(self.seq, head)
        crossing = self.layers * self.crossed * 2 * self.hidden * self.kv_width  # keys and values of the encoder's output
        products = flops.matrix_flops(self.seq, self.active_matrix_parameters - crossing) + flops.matrix_flops(self.crossing, crossing)
        return products + self.attention_flops(causal)

    def model_flops(self, causal: bool = False) -> Array:
        """FLOPs of one sequence, forward and backward, nothing recomputed: what MFU counts (6 N per token + attention)."""
        return flops.training_flops(self.forward_flops(causal))


def _experts(model: ResolvedModelConfig) -> Experts | None:
    e = model.experts
    if not e.count:
        return None
    ffn = e.ffn or model.ffn
    return Experts(e.count, e.active, ffn, e.shared_ffn, e.dense_layers, e.every, e.shared_gate, e.router_bias, e.imbalance)


def _latent(model: ResolvedModelConfig) -> LatentAttention | None:
    latent = model.latent
    return LatentAttention(latent.query_rank, latent.kv_rank, latent.rotary, latent.value) if latent.kv_rank else None
