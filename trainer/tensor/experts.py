"""Expert parallelism: tokens travel to the ranks of their experts and back.

    own        the rank's tokens: with sequence parallelism it has them already; else tensor ranks take equal parts of what they all have
    gathered   an all-gather: those of all ranks that have parts of the same experts, and what each one's router chose
    dispatch   copies in the order of their experts, an all-to-all of how many, one of the rows
    products   of each expert's matrices with its rows, weight gradients as in ``trainer.tensor.layers``
    combine    the same all-to-all backwards
    summed     a reduce-scatter of a token's weighed sums, each over a part of the width
    whole      what ``own`` took apart

Backward is the same in reverse. The expert ranks fold tensor, context and data ranks (arXiv 2504.14960): all of them have tokens of their
own, so the gradient of an expert is the sum over the ranks that have the same one, with no further factor.

Tokens are gathered before they are copied for each of their experts, and summed after their copies are: once a token, not once a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.comm.collectives import Group
from trainer.models.experts import Choice, Dispatched, Dispatcher, MixtureOfExperts, Router, balance_losses, by_expert, choose
from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.state.parameters import OptimizerShard, ParameterRecord
from trainer.tensor.layers import Gradients
from trainer.tensor.region import Region


class ExpertDispatcher(Dispatcher):
    """``Dispatcher`` of the tokens of the tensor ranks in ``region`` to experts on the ranks of ``group``, of which those of ``cut`` have
    parts."""

    def __init__(self, region: Region, group: Group, cut: Group):
        super().__init__()
        self.region, self.group, self.cut = region, group, cut

    @property
    def splits(self) -> bool:
        """Returns whether tensor ranks have the same tokens, of which each takes a part."""
        return self.region.group.size > 1 and not self.region.sequence_sharded

    def columns(self, x: Tensor) -> Tensor:
        """Returns the sequence of each of this rank's tokens, among those of x [s or s/t, b, h]."""
        tokens = torch.arange(x.shape[0] * x.shape[1], device=x.device)
        return (tokens[own_part(len(tokens), self.region.group)] if self.splits else tokens) % x.shape[1]

    def own(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        return _Part.apply(tokens, self.region.group) if self.splits else tokens

    def whole(self, y: Tensor, x: Tensor) -> Tensor:
        if self.splits:
            y = _Whole.apply(y, x.shape[0] * x.shape[1], self.region.group)
        return y.view(x.shape)

    def gathered(self, tokens: Tensor, choice: Choice, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.cut.size == 1:
            return super().gathered(tokens, choice, x)
        shares = self._shares(x)
        return _Gathered.apply(tokens, shares), shares.gather(choice.experts), _Gathered.apply(choice.weights, shares)

    def summed(self, y: Tensor, x: Tensor) -> Tensor:
        if self.cut.size > 1:
            y = _Summed.apply(y, self._shares(x))
        return y

    def _shares(self, x: Tensor) -> Shares:
        """Returns the tokens of each rank of ``cut``, whose x is as long. Tensor ranks are neighbours there, too."""
        tokens, tensor = x.shape[0] * x.shape[1], self.region.group
        if not self.splits:
            return Shares(self.cut, (tokens,) * self.cut.size)
        first = tensor.index - self.cut.index
        parts = (part_of(tokens, tensor.size, (first + place) % tensor.size) for place in range(self.cut.size))
        return Shares(self.cut, tuple(part.stop - part.start for part in parts))

    def dispatch(self, tokens: Tensor, experts: Tensor, count: int) -> Dispatched:
        order, inverse = by_expert(experts)
        rows = _Copies.apply(tokens, order, inverse, experts.shape[1])
        sizes = experts.flatten().bincount(minlength=count)
        if self.group.size == 1:
            return Dispatched(rows, sizes.tolist(), order, inverse)
        sent = sizes.view(self.group.size, -1)
        received = torch.empty_like(sent)  # [ranks, experts here]
        self.group.all_to_all(received, sent).wait()
        to, come = (counts.tolist() for counts in torch.stack((sent, received)).cpu())
        route = Route(self.group, [sum(counts) for counts in to], [sum(counts) for counts in come])
        names = torch.arange(received.shape[1], device=rows.device).repeat(self.group.size)
        arrived, back = by_expert(names.repeat_interleave(received.flatten(), output_size=sum(route.come)))
        rows = _Permuted.apply(_Exchanged.apply(rows, route), arrived, back)
        return Travelled(rows, [sum(counts) for counts in zip(*come)], order, inverse, route, arrived, back)

    def combine(self, rows: Tensor, sent: Dispatched) -> Tensor:
        if isinstance(sent, Travelled):
            rows = _Exchanged.apply(_Permuted.apply(rows, sent.back, sent.arrived), sent.route.reversed)
        combined: Tensor = _Permuted.apply(rows, sent.inverse, sent.order)
        return combined


@dataclass(frozen=True)
class Route:
    """Rows that go to and come from each rank of a group."""

    group: Group
    to: list[int]
    come: list[int]

    @property
    def reversed(self) -> Route:
        return replace(self, to=self.come, come=self.to)

    def exchange(self, rows: Tensor) -> Tensor:
        """Sends this rank's rows [sum of ``to``, h]; returns those that come."""
        found = rows.new_empty(sum(self.come), *rows.shape[1:])
        self.group.all_to_all(found, rows.contiguous(), self.come, self.to).wait()
        return found


@dataclass(frozen=True)
class Travelled(Dispatched):
    """Rows that have come from all ranks, in the order of the experts here: that of the rows as they ``arrived``, and ``back`` its
    inverse."""

    route: Route
    arrived: Tensor
    back: Tensor


def part_of(tokens: int, size: int, index: int) -> slice:
    """Returns part ``index`` of ``size`` of so many tokens; the last parts may be smaller, or empty."""
    width = -(-tokens // size)
    return slice(min(width * index, tokens), min(width * (index + 1), tokens))


def own_part(tokens: int, group: Group) -> slice:
    """Returns this rank's part."""
    return part_of(tokens, group.size, group.index)


@dataclass(frozen=True)
class Shares:
    """The tokens of the ranks of a group, so many of each. Collectives are of equal parts, so shorter ones are padded."""

    group: Group
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, tokens: int, group: Group) -> Shares:
        """Returns the shares of a group that has so many tokens."""
        parts = (part_of(tokens, group.size, index) for index in range(group.size))
        return cls(group, tuple(part.stop - part.start for part in parts))

    @property
    def width(self) -> int:
        return max(self.sizes)

    def gather(self, part: Tensor) -> Tensor:
        """Returns the tokens of all ranks, [sum of sizes, h], for this one's [size, h]."""
        padded = F.pad(part, (0, 0, 0, self.width - len(part))).contiguous()
        whole = padded.new_empty(self.width * self.group.size, *padded.shape[1:])
        self.group.all_gather(whole, padded).wait()
        if min(self.sizes) == self.width:
            return whole
        return torch.cat([rows[:size] for rows, size in zip(whole.split(self.width), self.sizes)])

    def sum(self, whole: Tensor) -> Tensor:
        """Returns the sum over ranks of what each has of this one's tokens, for all tokens."""
        if min(self.sizes) < self.width:
            parts = [F.pad(part, (0, 0, 0, self.width - len(part))) for part in whole.split(list(self.sizes))]
            whole = torch.cat(parts)
        own = whole.new_empty(self.width, *whole.shape[1:])
        self.group.reduce_scatter(own, whole.contiguous()).wait()
        return own[: self.sizes[self.group.index]]


class _Gathered(torch.autograd.Function):
    """The tokens of all ranks, each of which computes a part of what becomes of them."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, shares: Shares) -> Tensor:
        ctx.shares = shares
        return shares.gather(tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.shares.sum(gradients[0]), None


class _Summed(torch.autograd.Function):
    """A rank's own tokens, of which every rank has a summand."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, shares: Shares) -> Tensor:
        ctx.shares = shares
        return shares.sum(tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.shares.gather(gradients[0]), None


class _Part(torch.autograd.Function):
    """This rank's part of tokens that all ranks have."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, group: Group) -> Tensor:
        ctx.tokens, ctx.group = len(tokens), group
        return tokens[own_part(len(tokens), group)]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return Shares.of(ctx.tokens, ctx.group).gather(gradients[0]), None


class _Whole(torch.autograd.Function):
    """All ranks' parts, on every rank."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, tokens: int, group: Group) -> Tensor:
        ctx.group = group
        return Shares.of(tokens, group).gather(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][own_part(len(gradients[0]), ctx.group)], None, None


class _Copies(torch.autograd.Function):
    """Copies of tokens [T, h], ``active`` of each: [T K, h] in ``order``. Backward adds up those of a token always in the same order."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor, active: int) -> Tensor:
        ctx.active = active
        ctx.save_for_backward(inverse)
        return tokens.index_select(0, order // active)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse).unflatten(0, (-1, ctx.active)).sum(1), None, None, None


class _Permuted(torch.autograd.Function):
    """The same rows in another order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, *ctx.saved_tensors), None, None


class _Exchanged(torch.autograd.Function):
    """Rows for other ranks to rows from them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return route.exchange(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.route.reversed.exchange(gradients[0]), None


class ShardedRouter(nn.Module):
    """A ``Router`` whose weight gradient goes to ``gradients``. Its tokens are this rank's own."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, plain: Router, gradients: Gradients):
        super().__init__()
        self.weight, self.bias, self.gradients = weight, bias, gradients
        self.correction, self.experts = plain.correction, plain.experts

    def forward(self, tokens: Tensor) -> Choice:
        logits = _Logits.apply(tokens, self.weight, self)
        return choose(logits if self.bias is None else logits + self.bias.to(logits.dtype), self.correction, self.experts)


class _Logits(torch.autograd.Function):
    """The product with the weight, which is read anew in backward: its storage may have had another use."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, layer: ShardedRouter) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(tokens)
        wide = torch.promote_types(tokens.dtype, torch.float32)
        return F.linear(tokens.to(wide), layer.weight.to(wide))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        layer, (tokens,), dy = ctx.layer, ctx.saved_tensors, gradients[0]
        dx = (dy @ layer.weight.to(dy.dtype)).to(tokens.dtype) if ctx.needs_input_grad[0] else None
        if layer.weight.requires_grad:
            layer.gradients.later(lambda: layer.gradients.add_product(layer.weight, dy, tokens.to(dy.dtype)), dy, tokens)
        return dx, None, None


class ShardedExpertLinear(nn.Module):
    """This rank's part of an ``ExpertLinear``. Weight [experts here, *outputs here, inputs here]."""

    def __init__(self, weight: nn.Parameter, gradients: Gradients):
        super().__init__()
        self.weight, self.gradients = weight, gradients

    def forward(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        product: Tensor = _Grouped.apply(rows, self.weight, self, sizes)
        return product.unflatten(-1, self.weight.shape[1:-1])

    @property
    def matrices(self) -> Tensor:
        """Returns the weight as [experts, outputs, inputs]."""
        return self.weight.flatten(1, -2)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, layer: ShardedExpertLinear, sizes: Sequence[int]) -> Tensor:
        ctx.layer, ctx.sizes = layer, sizes
        ctx.save_for_backward(rows if layer.weight.requires_grad else None)
        return grouped(rows, layer.matrices.transpose(1, 2), sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        layer, sizes, (rows,), dy = ctx.layer, ctx.sizes, ctx.saved_tensors, gradients[0].contiguous()
        dx = grouped(dy, layer.matrices, sizes) if ctx.needs_input_grad[0] else None
        if rows is not None:
            layer.gradients.later(lambda: layer.gradients.add_grouped(layer.weight, dy, rows, sizes), dy, rows)
        return dx, None, None, None


def in_one_kernel(rows: Tensor) -> bool:
    """Returns whether torch's grouped product takes these rows: it reads 16 bytes at a time, and has no form for fp64."""
    return rows.is_cuda and rows.dtype == torch.bfloat16 and rows.shape[-1] % 8 == 0


def grouped(rows: Tensor, matrices: Tensor, sizes: Sequence[int]) -> Tensor:
    """Multiplies each expert's rows, of [R, k], by its matrix, of [experts, k, n]: [R, n]."""
    if in_one_kernel(rows) and matrices.shape[-1] % 8 == 0:
        return F.grouped_mm(rows, matrices, offs=torch.tensor(sizes, device=rows.device).cumsum(0, dtype=torch.int32))
    product = rows.new_empty(len(rows), matrices.shape[-1])
    for part, matrix, target in zip(rows.split(list(sizes)), matrices, product.split(list(sizes))):
        torch.mm(part, matrix, out=target)
    return product


class ExpertBalance:
    """The load of all experts in a step, and what balances it: losses in backward, and corrections after the step."""

    def __init__(self, c: ResolvedModelConfig, dtype: torch.dtype, device: torch.device, saves: bool):
        """``dtype`` is that of master weights; ``saves``: this rank is the first of those that have the same blocks."""
        self.c, self.seq, self.saves = c.experts, c.seq, saves
        self.rows = {block: row for row, block in enumerate(c.mixtures)}
        shape = len(self.rows), c.experts.count
        self.load = torch.zeros(shape, dtype=torch.float64, device=device)  # tokens of this rank; after a step, of all
        self.corrections = torch.zeros(shape, dtype=dtype, device=device)  # of all blocks, on every rank
        self.weight = 0.0  # of a token in the loss, times the loss scale
        self.shards: list[OptimizerShard] = []  # by which a checkpoint has the corrections

    def begin(self, weight: float) -> None:
        """Begins a step. ``weight``: of a token in the loss, times the loss scale."""
        self.weight = weight
        self.load.zero_()

    def end(self, load: Tensor, skip: Tensor) -> Tensor:
        """Moves the corrections after a step in which experts had ``load`` tokens, of all ranks, unless the scalar ``skip`` is 1 (Wang et
        al. 2024, arXiv 2408.15664). Returns the tokens of the busiest expert of a block over their mean."""
        self.load.copy_(load.view(self.load.shape))
        mean = self.load.mean(1, keepdim=True)
        if self.c.correction:
            self.corrections += (mean - self.load).sign() * (self.c.correction * (1 - skip))
        return (self.load.amax(1, keepdim=True) / mean.clamp(min=1)).amax()

    def attach(self, path: str, mixture: MixtureOfExperts, record: ParameterRecord | None) -> None:
        """Makes ``mixture`` at ``path`` count its tokens and read its corrections here. ``record``: that of corrections, if it has any."""
        row = self.rows[int(path.split(".")[1])]
        mixture.balanced = partial(self._balanced, row, mixture)  # type: ignore[method-assign]
        if record is not None:
            del mixture.router._parameters["correction"]
            mixture.router.correction = own = self.corrections[row]
            states = own, torch.zeros_like(own), torch.zeros_like(own), own[:0]
            self.shards.append(OptimizerShard(record, 0, len(own), *states, self.saves))

    def _balanced(self, row: int, mixture: MixtureOfExperts, choice: Choice, x: Tensor) -> Choice:
        """Returns the choice with weights whose gradient lets losses begin their backward. Tokens are counted there, too: forward may be
        repeated, backward is not."""
        if not (torch.is_grad_enabled() and mixture.router.weight.requires_grad):
            return choice
        assert isinstance(mixture.dispatcher, ExpertDispatcher)
        counted = choice.experts.flatten().bincount(minlength=self.c.count)
        weights = _Balanced.apply(choice.weights, self._loss(choice, x, mixture.dispatcher), lambda: self.load[row].add_(counted))
        return replace(choice, weights=weights)

    def _loss(self, choice: Choice, x: Tensor, dispatcher: ExpertDispatcher) -> Tensor | None:
        """Returns this rank's part of the losses of a micro-batch, in the unit of the loss of tokens; None if there are none."""
        c, losses = self.c, []
        if c.balance_loss:
            sequences, columns = x.shape[1], dispatcher.columns(x)
            cells = (columns[:, None] * c.count + choice.experts).flatten()
            load = cells.bincount(minlength=sequences * c.count).to(choice.scores.dtype)
            for group in (dispatcher.region.group, dispatcher.region.context):
                group.all_reduce(load).wait()
            shares = load.view(sequences, c.count) / (self.seq * c.active)
            losses.append(c.balance_loss * balance_losses(choice.scores, shares[columns]).sum())
        if c.z_loss:
            losses.append(c.z_loss * choice.logits.logsumexp(-1).square().sum())
        return self.weight * sum(losses[1:], losses[0]) if losses else None


class _Balanced(torch.autograd.Function):
    """The identity of weights; backward begins that of ``loss``, too, and calls ``counted``."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor | None, counted: Callable[[], object]) -> Tensor:
        ctx.counted, ctx.one = counted, None if loss is None else torch.ones_like(loss)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        ctx.counted()
        return gradients[0], ctx.one, None
