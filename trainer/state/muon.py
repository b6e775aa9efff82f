"""Muon: momentum that is orthogonalised, matrix by matrix (Jordan et al. 2024; at scale: Liu et al. 2025, arXiv 2502.16982).

    M = mu M + (1 - mu) G        in each rank's shard
    U = NS((1 - mu) G + mu M)    of whole matrices; without Nesterov, NS(M)
    W = W - lr (decay W + s U)   in each rank's shard

With ``row_beta`` each row of U has a second moment (NorMuon: Li et al. 2025, arXiv 2510.05491), kept by the rank that owns the matrix:

    v = row_beta v + (1 - row_beta) mean of U^2 over columns
    U = U / (sqrt(v) + eps), times what keeps the norm of U

NS makes the singular values of a matrix nearly one and keeps its singular vectors. All other parameters have AdamW: embeddings, the head,
norms, biases. Queries, keys and values are a matrix for each head, so tensor ranks have theirs whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from trainer.comm.collectives import Group
from trainer.models.layers import Init
from trainer.shared.parallel.placement import Replicate
from trainer.shared.run.optimizer import ORTHOGONALIZED
from trainer.shared.run.resolved import ResolvedOptimizerConfig
from trainer.state.matrices import MatrixExchange, MatrixKey
from trainer.state.offloaded import OffloadedAdamW
from trainer.state.optimizer import AdamW
from trainer.state.parameters import OptimizerShard, ParameterRecord

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""The factors a, b, c of a x + b x^3 + c x^5, whose repetition takes singular values from (0, 1] into [0.68, 1.13] (Jordan et al. 2024)."""

SCALES: dict[str, Callable[[int, int], float]] = {
    "rms": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "aspect": lambda rows, columns: math.sqrt(rows / columns),
}
"""Factors of an update, by ``optimizer.muon.scale``. With ``aspect`` an update changes outputs alike in any width (Yang et al. 2023, arXiv
2310.17813, condition 1)."""


def orthogonalised(x: Tensor, steps: int, eps: float) -> Tensor:
    """Returns the matrices x [k, n, m] with singular values near one: ``steps`` Newton-Schulz iterations of x / (norm + eps)."""
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    wide = torch.promote_types(x.dtype, torch.float32)
    x = (x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide) + eps)).to(x.dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def divide_rows(x: Tensor, squares: Tensor, share: Tensor, eps: float) -> None:
    """Moves second moments [k, n] of the rows of the matrices x [k, n, m] by ``share``, and divides rows by their roots; norms of matrices
    stay. x is read twice and written once."""
    lengths = torch.linalg.vector_norm(x, dim=-1, dtype=squares.dtype)
    squares.lerp_(lengths.square() / x.shape[-1], share)
    factors = 1 / (squares.sqrt() + eps)
    before, after = (torch.linalg.vector_norm(each, dim=-1, keepdim=True) for each in (lengths, lengths * factors))
    x.mul_((factors * before / after.clamp(min=torch.finfo(after.dtype).tiny))[..., None])


class Muon:
    """Muon for matrices, AdamW for all else. Making one is collective."""

    def __init__(
        self,
        config: ResolvedOptimizerConfig,
        tasks: Sequence[Sequence[OptimizerShard]],
        device: torch.device,
        groups: Mapping[str, Group],
        products: torch.dtype,
    ):
        """``groups`` of the ranks that have parts of the same matrices, by the axis over which those are repeated. ``products``: the type
        in which matrices travel and are multiplied."""
        self.config, empty = config, torch.empty(0, dtype=products, device=device)
        self.products = products
        self.rest = AdamW(config, [[p for p in task if p.record.group not in config.one_moment] for task in tasks], device)
        matrices = [(number, p) for number, task in enumerate(tasks) for p in task if p.record.group in config.one_moment]
        self.parts: list[tuple[MatrixExchange, list[tuple[int, OptimizerShard]]]] = []  # pieces, each with its task
        for axis, group in groups.items():
            pieces = [(task, p) for task, p in matrices if p.record.placement.get(axis) == Replicate()]
            self.parts.append((MatrixExchange([p for _, p in pieces], group, empty), pieces))
        self.squares: dict[MatrixKey, Tensor] = {}  # the second moments of rows, of the matrices that this rank owns
        self.shards: list[OptimizerShard] = []  # by which a checkpoint has them
        for exchange, pieces in self.parts if config.muon.row_beta else ():
            for matrix, piece in exchange.mine:
                shard = rows_of(pieces[piece][1], matrix.key)
                self.squares[matrix.key] = shard.weight
                self.shards.append(shard)

    def begin(self, updates: int) -> None:
        """Continues after so many updates."""
        self.rest.begin(updates)

    def step(self, lr: float, factors: Tensor, skip: Tensor) -> None:
        """Updates with each task's factor [tasks] times its gradients, unless the scalar ``skip`` is 1. Both are on the device."""
        self.rest.step(lr, factors, skip)
        rate = (1 - skip.double()) * (lr * self.config.lr_factor(ORTHOGONALIZED))
        for exchange, pieces in self.parts:
            directions = [self._direction(piece, factors[task], skip) for task, piece in pieces]
            for results in exchange.run(directions, partial(self._update, skip)):
                if results:
                    weights = [pieces[piece][1].weight[start : start + len(update)] for piece, start, update in results]
                    self._apply(weights, [update.to(weights[0].dtype) for *_, update in results], rate.to(weights[0].dtype))

    def _direction(self, piece: OptimizerShard, factor: Tensor, skip: Tensor) -> Tensor:
        """Renews the momentum of a piece. Returns the direction to orthogonalise. A step that is skipped changes no momentum, even if its
        gradient is not finite."""
        muon, gradient = self.config.muon, piece.gradient
        gradient.mul_(factor.to(gradient.dtype)).masked_fill_(skip > 0, 0.0)
        momentum = piece.exp_avg.to(gradient.dtype)
        momentum.lerp_(gradient, ((1 - muon.momentum) * (1 - skip.double())).to(gradient.dtype))
        if momentum is not piece.exp_avg:
            piece.exp_avg.copy_(momentum)
        return (gradient.lerp(momentum, muon.momentum) if muon.nesterov else momentum).to(self.products)

    def _update(self, skip: Tensor, matrices: Tensor, keys: Sequence[MatrixKey]) -> Tensor:
        muon = self.config.muon
        update = orthogonalised(matrices, muon.steps, self.config.eps)
        if muon.row_beta:
            known = [self.squares[key] for key in keys]
            squares = torch.stack(known)
            divide_rows(update, squares, ((1 - muon.row_beta) * (1 - skip.double())).to(squares.dtype), self.config.eps)
            torch._foreach_copy_(known, list(squares))
        return update * SCALES[muon.scale](*matrices.shape[-2:])

    def _apply(self, weights: list[Tensor], updates: list[Tensor], rate: Tensor) -> None:
        decay = self.config.weight_decay_of(ORTHOGONALIZED)
        if self.config.muon.cautious:
            for weight, update in zip(weights, updates):
                weight.mul_(1 - rate * decay * (weight * update > 0))
        else:
            torch._foreach_mul_(weights, 1 - rate * decay)
        torch._foreach_mul_(updates, rate)
        torch._foreach_sub_(weights, updates)


def rows_of(piece: OptimizerShard, key: MatrixKey) -> OptimizerShard:
    """Returns the second moments of the rows of a matrix, as a parameter of its own; ``piece`` has a part of the matrix."""
    record, (name, index) = piece.record, key
    rows = record.shape[-2]
    region = (*((i, i + 1) for i in index), (0, rows))
    own = ParameterRecord(f"{name}.rows", record.shape[:-1], region, (*(1 for _ in index), rows), Init(0.0), record.group, optional=True)
    squares, none = piece.weight.new_zeros(rows), piece.weight[:0]
    return OptimizerShard(own, 0, rows, squares, none, none, none, piece.saves)


def make_optimizer(
    config: ResolvedOptimizerConfig,
    tasks: Sequence[Sequence[OptimizerShard]],
    device: torch.device,
    groups: Mapping[str, Group],
    products: torch.dtype,
) -> AdamW | OffloadedAdamW | Muon:
    """Returns the optimizer ``config.kind``. Collective."""
    if any(piece.host is not None for task in tasks for piece in task):
        return OffloadedAdamW(config, tasks, device)
    return AdamW(config, tasks, device) if config.kind == "adamw" else Muon(config, tasks, device, groups, products)
