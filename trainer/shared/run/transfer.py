"""Transfer of hyper-parameters from a small base model to a wider one, or a deeper one (``model.transfer``). Pure.

With m = width over the base's and l = depth over the base's (completep; mup: 1), initial weights and AdamW's settings of the base become

    group        initial std    learning rate    weight decay    epsilon
    embedding    same           same             same            1 / m
    head         same           same             same            1 / m
    matrices     1 / sqrt(m)    1 / m            m               1 / (m l)
    vectors      same           same             same            1 / (m l)

Logits are divided by m, what attention and MLP add to the residual stream by l, and scores by the width of a head, not its root. The
product of learning rate and weight decay stays. Sources: Yang et al. 2022 (arXiv 2203.03466), table 8, for AdamW over widths; Dey et al.
2025 (arXiv 2505.01618), table 1 with alpha = 1, for depth, weight decay and epsilon. Matrices with few outputs whatever the width (a
router) begin with 1 / m, like an output of table 3 of the former. An orthogonalised update (Muon) with the factor sqrt(rows / columns) has
the right size in any width, and nothing else of it changes.

All ratios are those of the whole model, so a layout changes none of them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from trainer.shared.run.optimizer import ORTHOGONALIZED
from trainer.shared.run.resolved import ResolvedOptimizerConfig, ResolvedTrainConfig
from trainer.shared.run.schema import ModelConfig

BLOCKS = (ORTHOGONALIZED, "vectors")
"""Groups whose parameters are in blocks, but for the vectors of the head."""


@dataclass(kw_only=True)
class TransferredOptimizerConfig(ResolvedOptimizerConfig):
    """An optimizer whose settings, those of a base, become the model's own."""

    wider: float
    deeper: float

    def lr_factor(self, group: str) -> float:
        return super().lr_factor(group) / self._matrix(group)

    def weight_decay_of(self, group: str) -> float:
        return super().weight_decay_of(group) * self._matrix(group)

    def eps_of(self, group: str) -> float:
        return super().eps_of(group) / (self.wider * (self.deeper if group in BLOCKS else 1))

    def _matrix(self, group: str) -> float:
        """Returns the factor of matrices that AdamW updates."""
        return self.wider if group == ORTHOGONALIZED and group not in self.one_moment else 1.0


def transferred(config: ResolvedTrainConfig) -> TransferredOptimizerConfig:
    """Returns the optimizer of a run, with the settings that its groups of parameters have in a model of this size."""
    given, model = config.optimizer, config.model
    known = {f.name: getattr(given, f.name) for f in dataclasses.fields(given)}
    return TransferredOptimizerConfig(**known, wider=model.wider, deeper=model.deeper)


def score_factor(model: ModelConfig, head_width: int) -> float:
    """Returns the factor of attention scores by which they go with the width of a head instead of its root."""
    return math.sqrt((model.transfer.head_width or head_width) / head_width)
