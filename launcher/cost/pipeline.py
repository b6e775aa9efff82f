"""How long a pipeline takes for one step: closed forms of the schedules, for many layouts at once.

``trainer.layout.simulate`` runs the very action lists of the trainer, one layout at a time; these formulas are its answer for
whole spaces, and tests hold the two against each other. Stages are of three kinds: the first (embedding), the middle ones, the
last (head and loss).

1F1B is a machine of cycles: stage i may run ahead of the end by p - i micro-batches, so p - i of them pass in no less time than one
takes from stage i to the end and back. The slowest cycle sets the pace of the steady state (the maximal cycle mean of a
max-plus system: Baccelli et al. 1992, "Synchronization and Linearity", chapter 3); one traversal fills and drains.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from launcher.cost.shape import Number


@dataclass(frozen=True)
class Stages:
    """Seconds of one micro-batch on a pipeline rank, all its chunks together, by kind of rank; and of one transfer between ranks."""

    first: tuple[Number, Number]  # forward, backward
    middle: tuple[Number, Number]
    last: tuple[Number, Number]
    send: Number
    weight_share: float = 0.5  # part of backward that is weight gradient (zero-bubble splits it off)


@dataclass(frozen=True)
class Pipeline:
    """Seconds of one step's pipeline, and what they consist of."""

    total: Number
    busy: Number  # the mean rank computes
    transfers: Number  # waiting for messages
    bubble: Number  # the rest: waiting for other stages


def run(stages: Stages, ranks: Number, chunks: Number, micro_batches: Number, gpipe: Number, zero_bubble: Number) -> Pipeline:
    """One step. ``gpipe`` and ``zero_bubble`` say which layouts have that schedule; all others run (interleaved) 1F1B."""
    p, v, m = ranks, chunks, micro_batches
    still = _replace(stages, 0.0)
    total, calm = _one_step(stages, p, v, m, gpipe, zero_bubble), _one_step(still, p, v, m, gpipe, zero_bubble)
    busy = m * _mean(stages, p)
    return Pipeline(total, busy, total - calm, np.maximum(calm - busy, 0.0))


def _replace(stages: Stages, send: float) -> Stages:
    return Stages(stages.first, stages.middle, stages.last, send, stages.weight_share)


def _mean(stages: Stages, p: Number) -> Number:
    return _sum(stages, p, 0, 1) / p


def _sum(stages: Stages, p: Number, *ways: int) -> Number:
    """One traversal of all stages."""
    both = [np.where(p > 1, stages.first[w] + stages.last[w] + (p - 2) * stages.middle[w], stages.last[w]) for w in ways]
    return sum(both)


def _one_step(stages: Stages, p: Number, v: Number, m: Number, gpipe: Number, zero_bubble: Number) -> Number:
    plain = one_forward_one_backward(stages, p, m)
    return np.select(
        [gpipe, zero_bubble, v > 1], [fill_drain(stages, p, m), split_backward(stages, p, m), interleaved(stages, p, v, m)], plain
    )


def fill_drain(stages: Stages, p: Number, m: Number) -> Number:
    """GPipe: all forwards, then all backwards, each at the pace of its slowest stage or transfer."""
    once = _sum(stages, p, 0, 1) + 2 * (p - 1) * stages.send
    pace = [np.maximum(_slowest(stages, p, way), np.where(p > 1, stages.send, 0.0)) for way in (0, 1)]
    return once + (m - 1) * (pace[0] + pace[1])


def _slowest(stages: Stages, p: Number, *ways: int) -> Number:
    first, middle, last = (sum(kind[w] for w in ways) for kind in (stages.first, stages.middle, stages.last))
    return np.maximum(np.where(p > 1, np.maximum(first, last), last), np.where(p > 2, middle, 0.0))


def one_forward_one_backward(stages: Stages, p: Number, m: Number) -> Number:
    """1F1B: one traversal, then the pace of the slowest cycle."""
    once = _sum(stages, p, 0, 1) + 2 * (p - 1) * stages.send
    return once + (m - 1) * pace(stages, p, m)


def pace(stages: Stages, p: Number, m: Number) -> Number:
    """Seconds per micro-batch in the steady state of 1F1B: the slowest stage or cycle."""
    middle, last = sum(stages.middle), sum(stages.last)
    whole = (_sum(stages, p, 0, 1) + 2 * (p - 1) * stages.send) / p
    end = np.where(p > 2, (middle + last + 2 * stages.send) / 2, 0.0)
    return np.maximum(_slowest(stages, p, 0, 1), np.maximum(whole, end))


def interleaved(stages: Stages, p: Number, v: Number, m: Number) -> Number:
    """Interleaved 1F1B: the bubble is that of 1F1B divided by the chunks (Narayanan et al. 2021, section 2.2.2)."""
    chunk = _sum(stages, p, 0, 1) / (p * v)
    return m * _slowest(stages, p, 0, 1) + (p - 1) * chunk + 2 * stages.send * (m * v + p - 1)


def split_backward(stages: Stages, p: Number, m: Number) -> Number:
    """ZB-H1: weight gradients fill the idle time at the end (Qi et al. 2023, arXiv 2401.10241, section 3)."""
    weight = stages.weight_share * stages.middle[1]
    saved = np.minimum(2 * weight, sum(stages.middle)) * (p - 1)
    return np.maximum(one_forward_one_backward(stages, p, m) - saved, m * _slowest(stages, p, 0, 1))
