"""The schema of a run whose derived values are known: the same keys, none of which is None for "derived"."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from trainer.shared.run.optimizer import ORTHOGONALIZED, OptimizerConfig
from trainer.shared.run.schema import GATED, LayoutConfig, ModelConfig, TrainConfig


@dataclass(kw_only=True)
class ResolvedModelConfig(ModelConfig):
    """A model with its derived values (``trainer.shared.run.derived.resolve_model``)."""

    kv_heads: int = field()
    ffn: int = field()
    tied: bool = field()
    activation: str = field()
    init_std: float = field()
    head_width: int = field()
    positions: str = field()
    norm: str = field()
    norm_at: str = field()
    qk_norm: str = field()
    biases: list[str] = field()
    residual: str = field()
    attention_scale: float = field()
    residual_scale: float = field()
    logit_scale: float = field()
    encoder_layers: int = field()
    decoder_seq: int = field()

    @property
    def target_seq(self) -> int:
        """Returns the targets of a sequence: the decoder's tokens where there is an encoder."""
        return self.decoder_seq if self.encoder_layers else self.seq

    def writes(self, block: int) -> bool:
        """Returns whether block ``block`` is of a decoder that sees an encoder."""
        return 0 < self.encoder_layers <= block

    @property
    def gated(self) -> bool:
        """Returns whether the MLP has a gate."""
        return self.activation in GATED

    @property
    def matrix_std(self) -> float:
        """Returns the initial standard deviation of matrices of blocks, by the inputs that they add up."""
        return self.init_std / math.sqrt(self.wider)

    @property
    def few_std(self) -> float:
        """Returns that of matrices with few outputs whatever the width, such as a router's."""
        return self.init_std / self.wider

    @property
    def query_width(self) -> int:
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Returns the width of keys, and of values."""
        return self.kv_heads * self.head_width

    @property
    def value_width(self) -> int:
        """Returns the width of what attention gives to its output matrix."""
        return self.heads * (self.latent.value or self.head_width) if self.latent.kv_rank else self.query_width

    @property
    def turning(self) -> float:
        """Returns how many numbers of a query turn with its position."""
        return self.rope.share * (self.latent.rotary if self.latent.kv_rank else self.head_width)

    @property
    def expert_ffn(self) -> int:
        """Returns the inner width of one expert."""
        return self.experts.ffn or self.ffn

    def mixes(self, block: int) -> bool:
        """Returns whether block ``block`` has experts in place of an MLP."""
        e = self.experts
        return bool(e.count) and block >= e.dense_layers and (block + 1) % e.every == 0

    @property
    def mixtures(self) -> list[int]:
        """Returns the blocks that have experts."""
        return [block for block in range(self.layers) if self.mixes(block)]

    def window_of(self, block: int) -> int | None:
        """Returns how many positions block ``block`` looks back; None: all."""
        return None if self.full_every and (block + 1) % self.full_every == 0 else self.window

    def turns(self, block: int) -> bool:
        """Returns whether block ``block`` has rotary positions."""
        return self.positions == "rotary" and not (self.rope.skip_every and (block + 1) % self.rope.skip_every == 0)


@dataclass(kw_only=True)
class ResolvedLayoutConfig(LayoutConfig):
    """A layout whose data-parallel degree is known."""

    data: int = field()


@dataclass(kw_only=True)
class ResolvedOptimizerConfig(OptimizerConfig):
    """An optimizer whose learning-rate schedule is known. What a group has as all others is null."""

    min_lr: float = field()
    decay_steps: int = field()

    def lr_factor(self, group: str) -> float:
        """Returns the learning rate of a group of parameters over ``lr``."""
        own: float | None = getattr(self.groups, group).lr
        return 1.0 if own is None else own / self.lr

    def eps_of(self, group: str) -> float:
        """Returns AdamW's epsilon for a group of parameters."""
        return self.eps

    def weight_decay_of(self, group: str) -> float:
        own: float | None = getattr(self.groups, group).weight_decay
        return self.usual_decay(group) if own is None else own

    @property
    def one_moment(self) -> tuple[str, ...]:
        """Returns the groups of which one moment is kept, not two."""
        return (ORTHOGONALIZED,) if self.kind == "muon" else ()

    def usual_decay(self, group: str) -> float:
        """Returns the weight decay of a group that has none of its own."""
        return 0.0 if group == "vectors" else self.weight_decay


@dataclass(kw_only=True)
class ResolvedTrainConfig(TrainConfig):
    """A run with every derived value (``trainer.shared.run.rules.resolve``), as the trainer uses it. The same keys as ``TrainConfig``."""

    model: ResolvedModelConfig = field()
    layout: ResolvedLayoutConfig = field()
    optimizer: ResolvedOptimizerConfig = field()
