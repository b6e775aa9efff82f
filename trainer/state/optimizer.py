"""AdamW on the flat shards, the global gradient norm, and the learning rate. One pass over each shard; the host never waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from trainer.comm.collectives import Group
from trainer.shared.run.resolved import ResolvedOptimizerConfig
from trainer.state.parameters import OptimizerShard

WIDENED = 1 << 26
"""Elements of which there are copies at a time: of moments in fp32, where they are kept in bf16, half a gigabyte."""


LEFT: dict[str, Callable[[float], float]] = {
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
    "linear": lambda x: 1 - x,
    "sqrt": lambda x: 1 - math.sqrt(x),
}
"""Share of the way to ``min_lr`` that is left after a share x of the decay, by ``optimizer.decay_style``."""


def learning_rate(config: ResolvedOptimizerConfig, step: int, consumed: Callable[[int], int] = int) -> float:
    """Rate of step 0, 1, ...: linear warm-up over ``warmup_steps``, ``stable_steps`` at ``lr``, then a fall to ``min_lr`` at
    ``decay_steps`` (warm-up, stable, decay: Hu et al. 2024, arXiv 2404.06395; 1 - sqrt: Haegele et al. 2024, arXiv 2405.18392).

    Between those steps it goes with the tokens that so many steps have ``consumed``, in any unit."""
    if step < config.warmup_steps:
        return config.lr * consumed(step + 1) / consumed(config.warmup_steps)
    start = config.warmup_steps + config.stable_steps
    end = consumed(max(start, config.decay_steps)) - consumed(start)
    progress = min(1.0, max(0, consumed(step) - consumed(start)) / max(1, end))
    return config.min_lr + (config.lr - config.min_lr) * LEFT[config.decay_style](progress)


def sum_partial(owned: Sequence[OptimizerShard], axes: dict[str, Group]) -> None:
    """Sums gradients that are partial over an axis: one all-reduce per axis for all. ``axes``: groups, of equal elements, by name."""
    for axis, group in axes.items():
        pieces = [piece.sums for piece in owned if piece.record.partial(axis)]
        if pieces and group.size > 1:
            flat = torch.cat(pieces)
            group.all_reduce(flat).wait()
            for piece, total in zip(pieces, flat.split([p.numel() for p in pieces])):
                piece.copy_(total)


def squared_norm(owned: Sequence[OptimizerShard], device: torch.device) -> Tensor:
    """This rank's part of the squared norm of the gradient: each element of the model is counted by exactly one rank. fp64 scalar."""
    counted = [piece.sums for piece in owned if piece.saves]
    counted = [sums for sums in counted if len(sums)]  # a further zero would be another order of adding up
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(counted)).double().square().sum()


class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter 2019) on the pieces that this rank owns, if any; where it is cautious, only of weights
    that the update makes smaller (as Liang et al. 2024, arXiv 2411.16085, mask updates)."""

    def __init__(self, config: ResolvedOptimizerConfig, tasks: Sequence[Sequence[OptimizerShard]], device: torch.device):
        """``tasks`` are pieces whose gradients have each a factor of their own."""
        self.config = config
        self.groups = [
            (task, group, [piece for piece in owned if piece.record.group == group])
            for task, owned in enumerate(tasks)
            for group in sorted({piece.record.group for piece in owned})
        ]
        self.shards: list[OptimizerShard] = []  # of states beside those of the pieces, which a checkpoint has too
        self.steps = torch.zeros((), device=device)  # updates made: skipped steps do not count

    def begin(self, updates: int) -> None:
        """Continues after so many updates."""
        self.steps.fill_(updates)

    def step(self, lr: float, factors: Tensor, skip: Tensor) -> None:
        """Updates with each task's factor [tasks] times its gradients, unless the scalar ``skip`` is 1. Both are on the device."""
        self.steps += 1 - skip
        for task, group, pieces in self.groups:
            gradients, factor = [p.gradient for p in pieces], factors[task]
            wide = gradients[0].dtype == torch.float64  # the kernel's own scale has 24 bits
            if wide:
                torch._foreach_mul_(gradients, factor)
            rate, decay = lr * self.config.lr_factor(group), self.config.weight_decay_of(group)
            self._update(pieces, rate, decay, self.config.eps_of(group), None if wide else (1 / factor).float(), skip)

    def _update(self, pieces: Sequence[OptimizerShard], lr: float, decay: float, eps: float, scale: Tensor | None, skip: Tensor) -> None:
        cautious = self.config.cautious and decay > 0
        for part in _parts(pieces, cautious):
            weights, gradients, *moments = map(list, zip(*part, strict=True))
            averages, squares = ([m.to(w.dtype) for m, w in zip(each, weights)] for each in moments)
            before = [weight.clone() for weight in weights] if cautious else []
            torch._fused_adamw_(
                weights,
                gradients,
                averages,
                squares,
                [],
                [self.steps] * len(weights),
                lr=lr,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                weight_decay=0.0 if cautious else decay,
                eps=eps,
                amsgrad=False,
                maximize=False,
                grad_scale=scale,
                found_inf=skip,
            )
            for weight, old, average in zip(weights, before, averages):  # an update has the sign of the average
                weight -= old * (old * average > 0) * (lr * decay * (1 - skip).to(old.dtype))
            if averages[0] is not moments[0][0]:
                torch._foreach_copy_([*moments[0], *moments[1]], [*averages, *squares])


def _parts(pieces: Sequence[OptimizerShard], copied: bool = False) -> Iterator[list[tuple[Tensor, ...]]]:
    """Updates all pieces at once, or ``WIDENED`` elements at a time where weights are ``copied`` or moments are narrower than they."""
    states = [(p.weight, p.gradient, p.exp_avg, p.exp_avg_sq) for p in pieces]
    if pieces[0].exp_avg.dtype == pieces[0].weight.dtype and not copied:
        yield list(states)
        return
    part: list[tuple[Tensor, ...]] = []
    room = WIDENED
    for state, piece in zip(states, pieces, strict=True):
        first = 0
        while first < piece.numel:
            stop = min(first + room, piece.numel)
            part.append(tuple(tensor[first:stop] for tensor in state))
            first, room = stop, room - (stop - first)
            if room == 0:
                yield part
                part, room = [], WIDENED
    if part:
        yield part
