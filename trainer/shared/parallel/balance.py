"""Distributes transformer blocks over pipeline chunks, in model order (chunk i is global stage i), and positions over slices."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache, partial

from trainer.shared.parallel.sequence import Runs, consecutive, equal_work
from trainer.shared.run.flops import block_flops, head_flops, work_up_to
from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import LayoutConfig, ModelConfig

ALIGNED, FEWEST = 128, 16
"""Kernels of attention work in blocks of so many positions; slices are multiples of it where they have at least so many blocks."""


def blocks_per_chunk(model: ModelConfig, layout: LayoutConfig) -> list[int]:
    """Returns the blocks of each of the pipeline x virtual_pipeline chunks of a checked configuration; they add up to ``model.layers``.

    ``layout.stage_layers`` wins; else ``layout.balance``: equal counts, or equal cost.
    """
    chunks = layout.pipeline * layout.virtual_pipeline
    if layout.stage_layers is not None:
        return list(layout.stage_layers)
    if layout.balance == "equal":
        if model.layers % chunks:
            raise ValueError(f"{chunks} chunks do not divide {model.layers} blocks; balance by cost")
        return [model.layers // chunks] * chunks
    if isinstance(model, ResolvedModelConfig) and model.encoder_layers:
        return list(by_weights(tuple(block_flops(model, block) for block in range(model.layers)), chunks, head_flops(model)))
    return list(by_cost(model.layers, chunks, head_weight(model)))


def slices_of(model: ResolvedModelConfig, layout: LayoutConfig) -> Runs:
    """Returns the positions of each slice of a checked configuration: ``layout.slice_lengths``, or equal work. With sequence parallelism,
    tensor ranks share each."""
    if layout.slice_lengths is not None:
        return consecutive(layout.slice_lengths)
    unit = layout.tensor if layout.sequence_parallel else 1
    aligned = math.lcm(ALIGNED, unit)
    unit = aligned if model.seq % aligned == 0 and model.seq >= layout.slices * FEWEST * aligned else unit
    return equal_work(model.seq, layout.slices, unit, partial(work_up_to, model))


def head_weight(model: ModelConfig) -> float:
    """Returns the compute of output head and loss in units of one block: V / (12 h).

    A block's matrices hold 12 h^2 weights and the head's V h (Narayanan et al. 2021, appendix; exact for an MLP of 4 h). With a
    small hidden size the head outweighs many blocks: V=50304, h=256 gives 16. The input embedding is a lookup: no weight.
    """
    return model.vocab / (12 * model.hidden)


@lru_cache(maxsize=4096)
def by_cost(layers: int, chunks: int, head: float) -> tuple[int, ...]:
    """Returns the split whose heaviest chunk is lightest, when the last chunk also carries ``head`` blocks' worth of work.

    Only the last chunk's count is a choice. The others are even, with larger chunks later, because early stages have more
    micro-batches in flight. The smallest sum of squared loads also has the smallest maximum: moving a block never lowers one and
    raises the other.
    """
    if chunks == 1:
        return (layers,)
    splits = [(*_even(layers - last, chunks - 1), last) for last in range(layers - chunks + 2)]
    return min(splits, key=lambda split: round(sum(n * n for n in split[:-1]) + (split[-1] + head) ** 2, 9))


@lru_cache(maxsize=4096)
def by_weights(weights: tuple[float, ...], chunks: int, head: float) -> tuple[int, ...]:
    """Returns the split of blocks of these weights whose heaviest chunk is lightest, and of such splits one with a small sum of squares,
    when the last chunk also carries ``head``. Only the last chunk may have no block."""
    total = [0.0, *itertools.accumulate(weights)]
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, 0.0, 0)}]  # by blocks so far: heaviest, sum of squares, blocks before
    for chunk in range(1, chunks + 1):
        last, row = chunk == chunks, dict[int, tuple[float, float, int]]()
        ends = [len(weights)] if last else range(chunk, len(weights) + 1)
        for end in ends:
            options = []
            for start, (heaviest, squares, _) in best[-1].items():
                if start < end + last:
                    load = total[end] - total[start] + head * last
                    options.append((max(heaviest, load), squares + load**2, start))
            if options:
                row[end] = min(options)
        best.append(row)
    cuts = [len(weights)]
    for row in reversed(best[1:]):
        cuts.append(row[cuts[-1]][2])
    return tuple(high - low for low, high in itertools.pairwise(reversed(cuts)))


def _even(layers: int, chunks: int) -> tuple[int, ...]:
    """Distributes ``layers`` over ``chunks`` with counts that differ by at most one, the larger ones last."""
    return tuple((layers + i) // chunks for i in range(chunks))
