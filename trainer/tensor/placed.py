"""Layers for tokens whose position in their text differs from that in the row: rows hold several texts, or texts are read in parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from trainer.models.attention import AttentionCore, Rotary, rotated
from trainer.models.encoder_decoder import StackCore
from trainer.tensor.layers import ShardedPositionEmbedding
from trainer.tensor.region import rows_at


@dataclass(frozen=True)
class PackedTextStarts:
    """The starts of a micro-batch's texts: for each token [s, b] the first column of its text."""

    starts: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> PackedTextStarts:
        """Finds the texts of packed ``rows`` [s + 1, b], in which positions without a target hold ~token_id: a text ends with a target, and
        the next one begins without. Padding counts as a text."""
        here = rows[:-1]
        begins = torch.zeros_like(here)
        begins[1:] = (here[1:] < 0) & (here[:-1] >= 0)
        return cls((begins * torch.arange(len(here), device=rows.device)[:, None]).cummax(0).values)

    @cached_property
    def positions(self) -> Tensor:
        """Returns the position of each token in its text, [s, b]."""
        return torch.arange(len(self.starts), device=self.starts.device)[:, None] - self.starts

    @cached_property
    def visible(self) -> Tensor:
        """Returns the keys that each query sees, [b, 1, s, s]: those of its own text, up to itself. Blocks along the diagonal."""
        columns = torch.arange(len(self.starts), device=self.starts.device)
        return ((columns <= columns[:, None]) & (columns >= self.starts.t()[..., None]))[:, None]


@dataclass(frozen=True)
class ReadTokens:
    """The tokens of a micro-batch that an encoder reads: all but padding."""

    visible: Tensor  # [b, 1, 1, e]

    @classmethod
    def of(cls, length: int, rows: Tensor) -> ReadTokens:
        """Finds them in the first ``length`` tokens of ``rows`` [s, b], in which padding holds complements."""
        return cls((rows[:length] >= 0).t()[:, None, None])


class PlacedRotary(nn.Module):
    """``Rotary`` for tokens that stand anywhere."""

    def __init__(self, rotary: Rotary, positions: Callable[[], Tensor]):
        super().__init__()
        self.angles, self.runs, self.positions = rotary.angles, rotary.runs, positions

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates both, [s, b, heads, d], of which this rank has its part of the sequence. Angles are computed in fp64 and rounded."""
        frequency = torch.tensor(self.angles.frequencies, dtype=torch.float64, device=query.device)
        angle = rows_at(self.positions(), self.runs(query.shape[0])).double()[..., None, None] * frequency  # [s, b, 1, r/2]
        cos, sin = ((wave * self.angles.magnitude).to(query.dtype) for wave in (angle.cos(), angle.sin()))
        return rotated(query, cos, sin), rotated(key, cos, sin)


class PlacedPositions(nn.Module):
    """Learned positions for tokens that stand anywhere."""

    def __init__(self, plain: ShardedPositionEmbedding, positions: Callable[[], Tensor]):
        super().__init__()
        self.weight, self.region, self.positions = plain.weight, plain.region, positions

    def forward(self, x: Tensor) -> Tensor:
        """Adds positions to x [s, b, h], which is this rank's part of the sequence."""
        return x + self.weight[rows_at(self.positions(), self.region.runs(x.shape[0]))]


def place_embeddings(part: nn.Module, positions: Callable[[], Tensor]) -> None:
    """Makes the position layers of ``part`` read tokens' positions from ``positions``."""
    for parent in list(part.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Rotary):
                setattr(parent, name, PlacedRotary(child, positions))
            elif isinstance(child, ShardedPositionEmbedding):
                setattr(parent, name, PlacedPositions(child, positions))


def separate_texts(part: nn.Module, texts: Callable[[], PackedTextStarts]) -> None:
    """Makes each text of a row begin at position 0 and attend only to itself. A linear bias (ALiBi) only knows distances, and stays."""
    place_embeddings(part, lambda: texts().positions)
    for core in part.modules():
        if isinstance(core, AttentionCore):
            core.visible = lambda: texts().visible


def hide_padding(part: nn.Module, texts: Callable[[], Any]) -> None:
    """Makes attention to what an encoder reads blind to padding."""
    for core in part.modules():
        if isinstance(core, StackCore) and not core.causal:
            core.visible = lambda: texts().visible
