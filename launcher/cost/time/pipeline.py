"""How long a pipeline takes for one step: closed forms of the schedules, for many layouts at once.

``trainer.shared.parallel.simulate`` runs the very action lists of the trainer, one layout at a time; these formulas are its answer for
whole spaces, and tests hold the two against each other. PipelineTimes ranks are of three kinds: the first (embedding), the middle
ones, the last (head and loss).

A 1F1B step is the longest path through its computations: one traversal of all stages, plus for the other m - 1 micro-batches
the slowest way to get them past some point. Stage i may run ahead of its own backward by p - i micro-batches, so going once
from there to the end and back lets p - i of them pass (a cycle of the max-plus system: Baccelli et al. 1992, "Synchronization
and Linearity", chapter 3); or they pass one by one through a stage that is slow itself.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from launcher.cost.inputs.shape import Array
from launcher.cost.parts import ForwardBackward


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch on a pipeline rank, all its chunks together, by kind of rank; and of one transfer between ranks."""

    first: ForwardBackward
    middle: ForwardBackward  # the slowest of them
    typical: ForwardBackward  # the mean of them
    last: ForwardBackward  # with a single rank this is the whole model
    send: Array
    weight_share: float = 0.5  # part of backward that is weight gradient, which zero-bubble splits off; 0: weights are frozen

    def traversal(self, p: Array, *ways: int) -> Array:
        """One micro-batch through all ``p`` ranks, forward (0), backward (1) or both, without transfers."""
        first, middle, last = (sum(kind[way] for way in ways) for kind in (self.first, self.typical, self.last))
        return np.where(p > 1, first + last + np.maximum(p - 2, 0) * middle, last)

    def slowest(self, p: Array, *ways: int) -> Array:
        """The slowest rank."""
        first, middle, last = (sum(kind[way] for way in ways) for kind in (self.first, self.middle, self.last))
        return np.maximum(np.where(p > 1, np.maximum(first, last), last), np.where(p > 2, middle, 0.0))

    def cycle(self, p: Array, size: Array) -> Array:
        """From the rank that runs ``size`` micro-batches ahead to the end and back."""
        middle, last = sum(self.typical), sum(self.last)
        whole = self.traversal(p, 0, 1) + 2 * (p - 1) * self.send
        part = np.where(size > 0, (size - 1) * (middle + 2 * self.send) + last, 0.0)
        return np.where(size == p, whole, part)


@dataclass(frozen=True)
class PipelineTimes:
    """Seconds of one step's pipeline, and what they consist of."""

    total: Array
    transfers: Array  # what transfers between ranks add to it


def run(
    stages: StageTimes, ranks: Array, chunks: Array, micro_batches: Array, gpipe: Array, zero_bubble: Array, further: float = 0.0
) -> PipelineTimes:
    """One step. ``gpipe`` and ``zero_bubble`` say which layouts have that schedule; all others run (interleaved) 1F1B. With ``zero_bubble``
    ranks may hold ``further`` micro-batches per stage, beyond those of 1F1B."""
    total = _step(stages, ranks, chunks, micro_batches, gpipe, zero_bubble, further)
    instant = dataclasses.replace(stages, send=np.zeros_like(total))
    return PipelineTimes(total, total - _step(instant, ranks, chunks, micro_batches, gpipe, zero_bubble, further))


def _step(stages: StageTimes, p: Array, v: Array, m: Array, gpipe: Array, zero_bubble: Array, further: float) -> Array:
    plain = one_forward_one_backward(stages, p, m)
    others = [fill_drain(stages, p, m), split_backward(stages, p, m, plain, further), interleaved(stages, p, v, m)]
    chosen = [np.asarray(one) for one in (gpipe, zero_bubble, v > 1)]
    return np.select(chosen, [np.asarray(seconds) for seconds in others], plain)


def fill_drain(stages: StageTimes, p: Array, m: Array) -> Array:
    """GPipe: all forwards, then all backwards, each at the pace of its slowest rank or transfer. Exact."""
    once = stages.traversal(p, 0, 1) + 2 * (p - 1) * stages.send
    pace = [np.maximum(stages.slowest(p, way), np.where(p > 1, stages.send, 0.0)) for way in (0, 1)]
    return once + (m - 1) * (pace[0] + pace[1])


def one_forward_one_backward(stages: StageTimes, p: Array, m: Array) -> Array:
    """1F1B. Exact for equal ranks and for a slow last rank; a few per cent low where a slow first rank meets long transfers."""
    more = np.ceil(m) - 1
    paths = [_cycles(stages, p, size, more) for size in (p, np.maximum(p - 1, 1), np.minimum(p, 2), np.ones_like(p))]
    paths.append(np.where(p > 1, _one_by_one(stages.first, more, p), 0.0))
    paths.append(np.where(p > 2, _one_by_one(stages.middle, more, np.full_like(p, 2)), 0.0))
    once = stages.traversal(p, 0, 1) + 2 * (p - 1) * stages.send
    return np.maximum(once + np.max(np.broadcast_arrays(*paths), axis=0), np.ceil(m) * stages.slowest(p, 0, 1))


def _cycles(stages: StageTimes, p: Array, size: Array, more: Array) -> Array:
    """``more`` micro-batches pass in cycles of ``size``, the rest in one smaller cycle."""
    rounds = np.floor(more / size)
    return rounds * stages.cycle(p, size) + stages.cycle(p, more - rounds * size)


def _one_by_one(rank: ForwardBackward, more: Array, ahead: Array) -> Array:
    """``more`` micro-batches pass through one rank. Its cheaper direction only counts for micro-batches beyond the run-ahead window."""
    return more * np.maximum(*rank) + np.maximum(more + 1 - ahead, 0.0) * np.minimum(*rank)


def interleaved(stages: StageTimes, p: Array, v: Array, m: Array) -> Array:
    """Interleaved 1F1B: the bubble of 1F1B divided by the chunks (Narayanan et al. 2021, section 2.2.2). Sends do not block, so a step
    waits for one traversal of all boundaries in each direction, unless a link is busy longer than the ranks. Ranks take turns with groups
    of ``p`` micro-batches: where the last group is smaller, its later chunks wait for their first micro-batch to come round."""
    forward, backward = (stages.traversal(p, way) / (p * v) for way in (0, 1))
    steady = m * stages.slowest(p, 0, 1) + (p - 1) * (forward + backward) + 2 * stages.send * (p * v - 1)
    short = -np.ceil(m) % p  # of a whole group
    waits = short * (v - 1) * np.where(m < p, forward + backward, np.maximum(forward, backward))
    return np.maximum(steady + waits, m * v * stages.send)


def turns(p: Array, v: Array, m: Array) -> tuple[Array, Array]:
    """First and last turns of a rank of interleaved 1F1B, in passes of a micro-batch through all its ``v`` chunks: forward until the last
    chunk has been used for the first time, and backward from when the first chunk sees its last micro-batch to the end. Chunks take turns
    with ``p`` micro-batches, or as many as there are, and each is gathered before its first turn and reduced after its last one
    (Megatron-LM, core/pipeline_parallel/schedules.py: ``param_sync_func``, ``grad_sync_func``). One pass for a single chunk."""
    first, last = np.minimum(m, p), m - p * (np.ceil(m / p) - 1)
    return 1 + (first - 1) * (1 - 1 / v), 1 + (last - 1) * (1 - 1 / v)


def split_backward(stages: StageTimes, p: Array, m: Array, plain: Array, further: float = 0.0) -> Array:
    """ZB-H1 (Qi et al. 2023, arXiv 2401.10241, section 3): the weight gradients of all but the last rank leave the way back, and up to
    p - 1 more forwards find the time that they left. Exact for equal ranks. With one ``further`` micro-batch per stage it is ZB-H2: as many
    forwards again start while ranks would wait for the first backward."""
    forward, backward = (np.where(p > 2, typical, first) for typical, first in zip(stages.typical, stages.first))
    weight = stages.weight_share * backward
    saved = weight * (p - 1) + np.minimum(weight, forward) * np.minimum(m - 1, (p - 1) * (1 + further))
    return np.maximum(plain - saved, m * stages.slowest(p, 0, 1))
