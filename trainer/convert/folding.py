"""A transferred model as other programs know it: what it multiplies by (``model.transfer``) is multiplied into its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.pieces import ParameterPiece
from trainer.checkpoint.shards import Reader
from trainer.checkpoint.tuned import Merged
from trainer.shared.families.block import branches
from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import TransferConfig


def folded(model: ResolvedModelConfig) -> ResolvedModelConfig:
    """Returns the model of the folded weights: the usual factors, and no transfer."""
    if model.transfer.kind == "none":
        return model
    usual: dict[str, Any] = {"attention_scale": None, "residual_scale": None, "logit_scale": None}
    return resolve_model(dataclasses.replace(model, transfer=TransferConfig(), **usual))


def factor(name: str, model: ResolvedModelConfig) -> float:
    """Returns the factor of the parameter ``name`` in a transferred model: the last norm has that of logits, queries that of scores, and
    the last layer of attention and MLP that of what they add."""
    usual = folded(model)
    path = name.split(".")[:-1]
    if path[0] == "head":
        return model.logit_scale / usual.logit_scale if path[-1] == "norm" else 1.0
    if path[-1] == ("qkv" if model.qk_norm == "none" else "query_norm"):
        return model.attention_scale / usual.attention_scale
    last = (("attention", "output"), ("mlp", "down"), ("shared", "down"))
    normed = any(part.after for part in branches(model.norm_at, model.residual))
    adds = path[-1].endswith("_post_norm") if normed else tuple(path[-2:]) in last
    return model.residual_scale / usual.residual_scale if adds else 1.0


class FoldedReader:
    """The pieces of a checkpoint, with the factors of its model multiplied into them."""

    def __init__(self, reader: Reader | Merged, model: ResolvedModelConfig):
        self.reader, self.model, self.shapes = reader, model, reader.shapes
        self.offset = FAMILIES[model.family].norm_offset

    def read(self, piece: ParameterPiece, states: Mapping[str, Tensor]) -> None:
        """Reads the states of a whole parameter, as ``Reader.read`` does."""
        times = factor(piece.name, self.model)
        if times == 1.0:
            self.reader.read(piece, states)
            return
        for state, target in states.items():
            own = torch.empty(target.shape, dtype=torch.float64)
            self.reader.read(piece, {state: own})
            target.copy_(self._times(piece.name, own, times))

    def _times(self, name: str, flat: Tensor, times: float) -> Tensor:
        if name.endswith("norm.weight") and self.offset:
            return times * (1 + flat) - 1
        if ".qkv." not in name:
            return times * flat
        groups = flat.view(self.model.kv_heads, self.model.heads // self.model.kv_heads + 2, -1)
        groups[:, :-2] *= times  # the queries
        return flat
