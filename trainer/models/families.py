"""The model families as data. Block, embedding and head are the same code for all of them (``trainer.models.transformer``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.models.layers import LayerNorm, RMSNorm


@dataclass(frozen=True)
class Family:
    """What distinguishes a family. Activation, MLP width, grouped queries and tied embeddings are keys of the model."""

    norm: type[LayerNorm] | type[RMSNorm]
    biases: bool  # of the matrices in a block
    positions: Literal["learned", "rotary", "alibi"]
    embedding_norm: bool = False
    embedding_dropout: bool = True


FAMILIES = {
    "gpt": Family(LayerNorm, biases=True, positions="learned"),  # GPT-2/3: Radford et al. 2019, Brown et al. 2020
    "llama": Family(RMSNorm, biases=False, positions="rotary"),  # Touvron et al. 2023
    "bloom": Family(LayerNorm, biases=True, positions="alibi", embedding_norm=True, embedding_dropout=False),  # Le Scao et al. 2022
}
"""By ``model.family``."""
