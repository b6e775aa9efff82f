"""Context parallelism: attention of ranks that share sequences, of each of which they have two pieces
(``trainer.shared.parallel.sequence``).

    all_gather   every rank gets all keys and values, its own queries attend to them; backward sums their gradients over the ranks
                 (Dubey et al. 2024, arXiv 2407.21783, section 3.3.2)
    all_to_all   every rank gets whole sequences of a part of the heads, and gives its outputs back (Jacobs et al. 2023, arXiv 2309.14509)
    ring         keys and values pass from rank to rank while attention computes (``trainer.tensor.ring``)

With s tokens, queries of h numbers, keys and values of g each, a rank of c sends 2 s g (c - 1) / c in the first and last and
2 s (h + g) (c - 1) / c^2 in the second: keys and values are less while g (c - 1) < h, and any number of heads will do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.comm.collectives import Group
from trainer.models.attention import AttentionCore
from trainer.shared.parallel.sequence import with_rows, zigzag
from trainer.tensor.layers import Gradients
from trainer.tensor.region import Region, places
from trainer.tensor.ring import RingExchange

Way = Callable[[Tensor, Group], Tensor]
"""A tensor of this rank to one that other ranks have a share in, or back."""


class KeyExchange:
    """Lets this rank's queries see the keys and values of all context ranks."""

    def __init__(self, region: Region, gradients: Gradients):
        self.region, self.gradients = region, gradients

    def __call__(self, core: AttentionCore, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        own = torch.cat((key, value), -1)
        every: Tensor = _ThereAndBack.apply(own, self.region.context, gathered, scattered)
        keys, values = every.split((key.shape[-1], value.shape[-1]), -1)
        beside = query.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()  # what keeps the query keeps all three
        parts = [part.detach() for part in ((key, value) if beside else (own,))]
        again = core.gathers_again and core.alibi is None and own.requires_grad  # ALiBi widens keys and values: copies of its own
        with self._lent(parts, every) if again else contextlib.nullcontext():
            return core.attend(query, keys, values, self.region.whole_runs(len(query)))

    def _lent(self, parts: list[Tensor], every: Tensor) -> contextlib.AbstractContextManager[None]:
        """Inside, autograd keeps no view of ``every``, which was gathered from ``parts`` side by side: backward gathers it again, once."""
        place, counts, group = every.untyped_storage().data_ptr(), self.gradients.counts, self.region.context
        missing, kept = 0, [(part, counts(part)) for part in parts]
        held: list[Tensor] = []

        def pack(saved: Tensor) -> tuple[Any, ...]:
            nonlocal missing
            if saved.untyped_storage().data_ptr() != place:
                return saved, counts(saved)
            missing += 1
            return saved.shape, saved.stride(), saved.storage_offset()

        def unpack(packed: tuple[Any, ...]) -> Tensor:
            nonlocal missing
            if isinstance(packed[0], Tensor):
                return packed[0]
            whole = held.pop() if held else gathered(torch.cat([part for part, _ in kept], -1), group)
            missing -= 1
            if missing:
                held.append(whole)
            return whole.as_strided(*packed)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class HeadExchange:
    """Lets this rank attend in whole sequences with a part of its heads."""

    def __init__(self, region: Region, gradients: Gradients):
        self.region = region

    def __call__(self, core: AttentionCore, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group = self.region.context
        parts = [x.unflatten(2, (group.size, -1)).flatten(3) for x in (query, key, value)]  # [s/c, b, c, width/c]: widths may differ
        every: Tensor = _ThereAndBack.apply(torch.cat(parts, 3), group, to_sequences, to_parts)  # [s, b, widths/c]
        widths = [part.shape[3] for part in parts]
        heads = (part.unflatten(2, (-1, x.shape[3])) for part, x in zip(every.split(widths, 2), (query, key, value)))
        output = core.attend(*heads)  # [s, b, width/c]
        own: Tensor = _ThereAndBack.apply(output, group, to_parts, to_sequences)  # [s/c, b, c, width/c]
        return own.flatten(2)


ContextExchange = KeyExchange | HeadExchange | RingExchange
EXCHANGE_CLASSES: dict[str, type[ContextExchange]] = {
    "all_gather": KeyExchange,
    "all_to_all": HeadExchange,
    "ring": RingExchange,
}
"""By ``run.context_exchange``."""


def gathered(own: Tensor, group: Group) -> Tensor:
    """Returns whole sequences [s, ...] of the parts [s/c, ...] of context ranks."""
    ranked = own.new_empty(len(own) * group.size, *own.shape[1:])
    group.all_gather(ranked, own.contiguous()).wait()
    return ranked[order(len(ranked), group, own.device)]


def order(length: int, group: Group, device: torch.device) -> Tensor:
    """Returns, for each position of a sequence, its row where the parts of all ranks follow each other."""
    runs = [run for rank in range(group.size) for run in zigzag(length, group.size, rank)]
    return places(tuple(range(rows.start, rows.stop) for rows, _ in sorted(with_rows(tuple(runs)), key=lambda pair: pair[1].start)), device)


def by_rank(whole: Tensor, group: Group) -> Tensor:
    """Returns the rows of sequences [s, ...] as those of rank after rank."""
    return whole[places(tuple(run for rank in range(group.size) for run in zigzag(len(whole), group.size, rank)), whole.device)]


def scattered(whole: Tensor, group: Group) -> Tensor:
    """Returns this rank's part [s/c, ...] of the sum of all ranks' sequences [s, ...]."""
    ranked = by_rank(whole, group)
    own = ranked.new_empty(len(ranked) // group.size, *ranked.shape[1:])
    group.reduce_scatter(own, ranked).wait()
    return own


def to_sequences(parts: Tensor, group: Group) -> Tensor:
    """Exchanges the heads of all ranks in parts of sequences [s/c, b, c, n, ...] for this rank's heads in whole ones [s, b, n, ...]."""
    sent = parts.movedim(2, 0).contiguous()
    come = torch.empty_like(sent)
    group.all_to_all(come, sent).wait()
    whole = come.flatten(0, 1)
    return whole[order(len(whole), group, whole.device)]


def to_parts(whole: Tensor, group: Group) -> Tensor:
    """Undoes ``to_sequences``."""
    sent = by_rank(whole, group).unflatten(0, (group.size, -1))
    come = torch.empty_like(sent)
    group.all_to_all(come, sent).wait()
    return come.movedim(0, 2)


class _ThereAndBack(torch.autograd.Function):
    """One of these ways; gradients take the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, there: Way, back: Way) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradients[0], ctx.group), None, None, None
