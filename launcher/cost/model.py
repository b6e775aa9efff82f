"""The whole prediction for one ``Case``: step time and memory by part, for all its layouts at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from launcher.cost.inputs import stages
from launcher.cost.inputs.alike import LayoutGroups
from launcher.cost.inputs.case import Case
from launcher.cost.inputs.shape import Array
from launcher.cost.memory import activations, peak
from launcher.cost.parts import (
    BUBBLE,
    EMBEDDING,
    GATHER,
    HEAD,
    HOST,
    OFFLOAD,
    REDUCE,
    STEP,
    TRANSFERS,
    UPDATE,
    ForwardBackward,
    Parts,
    add,
    scale,
    total,
)
from launcher.cost.time import block, collectives, data_parallel, embedding_head, offload, pipeline
from trainer.shared.parallel.boundary import boundary_elements


@dataclass(frozen=True)
class Estimate:
    """Arrays over layouts: seconds and bytes by part, which add up to the totals."""

    time: Parts
    memory: Parts
    fits: np.ndarray
    behind_host: Parts  # of ``time``, what the device does while it waits for its host anyway
    host: Parts  # bytes of a rank in host memory
    flops: Array  # model FLOPs of a step (nothing recomputed), all ranks

    @property
    def causes(self) -> Parts:
        """Seconds by the part that they depend on: what a device does while it waits for its host counts as launching. They add up to the
        step time, too."""
        if not self.behind_host:
            return self.time
        left = {name: self.time[name] - seconds for name, seconds in self.behind_host.items()}
        return self.time | left | {HOST: self.time[HOST] + total(self.behind_host)}

    @property
    def step_time(self) -> np.ndarray:
        return np.asarray(total(self.time))

    @property
    def memory_total(self) -> np.ndarray:
        return np.asarray(total(self.memory))


def estimate(case: Case, split: Sequence[int] | None = None) -> Estimate:
    """Predict every layout of ``case``. ``split``: explicit blocks per chunk, for a case of one layout."""
    held = stages.held(case, split)
    needed = peak.peak(case, held)
    counted = sum(needed[name] for name in peak.COUNTED)
    possible = np.minimum(fits(case, total(needed)), fits(case, counted, case.budget))
    done, factor = passes(case, held), case.device.time_factor
    flops, hosted = case.shape.model_flops() * case.global_batch, peak.on_host(case, held)
    return Estimate(scale(_step(case, held, done), factor), needed, possible, scale(done.behind_host, factor), hosted, flops)


def fits(case: Case, needed: Array, capacity: float | None = None) -> np.ndarray:
    """Probability that ``needed`` bytes fit, into the device by default: a logistic curve as wide as the estimate is uncertain."""
    distance = (np.log(case.device.memory if capacity is None else capacity) - np.log(needed)) / case.constants.oom_spread
    return 1 / (1 + np.exp(-1.7 * np.clip(distance, -50, 50)))


@dataclass(frozen=True)
class MicroBatchTimes:
    """Seconds of a step's micro-batches on the pipeline, before what data parallelism and the optimizer add."""

    parts: Parts
    whole: Array  # the length of the pipeline's run
    forward: Array  # of one block and micro-batch
    backward: Array  # of one block and micro-batch, recomputation included
    behind_host: Parts  # of ``parts``, what the device does while it waits for its host anyway

    def spread(self, alike: LayoutGroups) -> MicroBatchTimes:
        """Those of all layouts, of those of every kind."""
        parts, behind = ({name: alike.spread(value) for name, value in each.items()} for each in (self.parts, self.behind_host))
        return MicroBatchTimes(parts, alike.spread(self.whole), alike.spread(self.forward), alike.spread(self.backward), behind)


def step(case: Case, held: stages.StageShare) -> Parts:
    """Seconds of one step by part."""
    return _step(case, held, passes(case, held))


def _step(case: Case, held: stages.StageShare, done: MicroBatchTimes) -> Parts:
    return done.parts | scale(once(case, held, done), case.device.oversubscription)


def passes(case: Case, held: stages.StageShare) -> MicroBatchTimes:
    """Seconds of a step's micro-batches. Layouts that differ in their shards alone share them."""
    alike = LayoutGroups.of_case(case)
    return _passes(alike.case, held.at(alike.rows)).spread(alike)


def _passes(case: Case, held: stages.StageShare) -> MicroBatchTimes:
    one = block.of_stacks(case)
    share = [(stack.shape.layers + stack.shape.predicted_tokens) / case.pipeline for stack in case.stacks]  # of a rank
    embedding, head = embedding_head.embedding(case), embedding_head.head(case)
    m, wait = case.micro_batches, blocking(case)
    kinds = stage_times(case, held, one)
    further = case.trainer.pipeline.extra_in_flight_per_stage
    run = pipeline.run(kinds, case.pipeline, case.chunks, m, case.scheduled("gpipe"), case.scheduled("zero_bubble"), further)
    parts = add(*(scale(add(each.forward, each.backward, each.again), m * per_rank) for each, per_rank in zip(one, share)))
    parts[EMBEDDING] = m * sum(embedding) / case.pipeline
    parts[HEAD] = m * sum(head) / case.pipeline
    if case.device.oversubscription > 1:
        parts = oversubscribed(case, parts, run.total)
    else:
        idle = run.total - total(parts)
        parts[TRANSFERS] = np.minimum(run.transfers + 2 * m * wait, np.maximum(idle, 0.0))
        parts[BUBBLE] = idle - parts[TRANSFERS]
    behind = add(*(scale(each.behind_host, m * per_rank) for each, per_rank in zip(one, share)))
    forward = sum(total(each.forward) * part for each, part in zip(one, share)) / sum(share)
    backward = sum((total(each.backward) + total(each.again)) * part for each, part in zip(one, share)) / sum(share)
    return MicroBatchTimes(parts, run.total, forward, backward, behind)


def oversubscribed(case: Case, parts: Parts, path: Array) -> Parts:
    """More ranks than cores: a step takes all its work over all cores, or its critical path at one core per rank if that is longer."""
    stages, factor = case.pipeline, case.device.oversubscription
    handed = 4 * case.micro_batches * case.chunks * (stages - 1) / stages * transfer(case)  # sent and received, both ways
    busy = scale(parts | {TRANSFERS: handed}, factor)
    busy[BUBBLE] = np.maximum(path - total(busy), 0.0)
    return busy


def stage_times(case: Case, held: stages.StageShare, one: Sequence[block.BlockTimes]) -> pipeline.StageTimes:
    """Seconds of one micro-batch on each kind of pipeline rank, and of one transfer that computation does not wait for. ``one``: those of a
    block of each stack."""
    first, middle, last = embedding_head.by_stage(case)
    slow = 1 + case.constants.jitter * np.sqrt(2 * np.log(case.pipeline))
    each = [(total(times.forward) * slow, (total(times.backward) + total(times.again)) * slow) for times in one]
    wait = blocking(case)  # 0 for a single rank

    def stage(kind: str, ends: ForwardBackward, waits: Array) -> ForwardBackward:
        counts = [getattr(stack, kind) for stack in held.stacks]
        forward, backward = (sum(count * times[way] for count, times in zip(counts, each)) for way in (0, 1))
        return forward + ends[0] + waits, backward + ends[1] + waits

    return pipeline.StageTimes(
        first=stage("first", first, wait / 2),
        middle=stage("middle", middle, wait),
        typical=stage("typical", middle, wait),
        last=stage("last", last, wait / 2),
        send=np.zeros_like(wait) if case.trainer.pipeline.blocking_sends else transfer(case),
        weight_share=0.0 if case.shape.frozen else 0.5,
    )


def blocking(case: Case) -> np.ndarray:
    """Seconds per micro-batch and direction for which a rank waits for its transfers: all of them where sends block, else those
    that stay visible."""
    shown = 1.0 if case.trainer.pipeline.blocking_sends else 1 - case.constants.sends_hidden
    return shown * transfer(case) * case.chunks


def transfer(case: Case) -> np.ndarray:
    """Seconds to hand a micro-batch's activations to the next stage."""
    split = case.tensor if case.trainer.pipeline.split_sends else case.sequence_split
    payload = sum(boundary_elements(stack.tokens, 1, case.shape.hidden) for stack in case.stacks) * case.width / split
    sent = collectives.send(case.device, case.constants, case.stages_apart, payload)
    return np.where(case.pipeline > 1, sent, 0.0)


def offloading(case: Case, held: stages.StageShare) -> np.ndarray:
    """Seconds to copy stored block inputs to the host and back, and gradients and weights of a shard whose states are all there."""
    f, inputs = case.trainer, case.micro_batches * held.blocks.most() * case.recomputed_blocks * activations.stored_input(case)
    shard = (held.dense.most() + held.expert.most()) / case.field("optimizer") * case.width
    return 2 * (inputs * f.recompute.inputs_on_host + shard * f.memory.optimizer_on_host) / case.constants.host_link


def once(case: Case, held: stages.StageShare, done: MicroBatchTimes) -> Parts:
    """Seconds that data parallelism and the optimizer add to a step, less the part that hides behind computation."""
    work, f, c, m = data_parallel.work(case, held), case.trainer, case.constants, case.micro_batches
    per_rank, busy = held.blocks.most(), done.whole
    ahead, back = per_rank * done.forward, per_rank * done.backward
    before_last, after_first = pipeline.turns(case.pipeline, case.chunks, m)
    gathers = np.where(case.kept_whole, 1, m) * work.gather
    hides = c.data_hidden if case.device.overlaps else 0.0
    hidden_gathers = np.minimum(gathers * hides, busy) if f.overlap.gathers else 0.0
    often = np.where((case.field("grads") > 1) & f.overlap.reduce_every_micro_batch & ~case.reduced_last, m, 1)
    reductions = work.scatter * often + work.reduce
    cover = np.minimum(np.maximum(often, after_first) * back, busy - hidden_gathers)  # a second hides one thing
    there, lazy = offload.times(case, held), case.field("offload") > 0
    early = ~(f.overlap.states_wait & (case.field("optimizer") > 1) & (case.field("params") == 1))
    hidden_reductions = np.minimum(reductions * hides, cover) * early if f.overlap.gradients else 0.0
    refresh = work.refresh
    hidden_down = np.minimum(there.down * hides, cover - hidden_reductions)
    free = np.minimum(before_last * ahead, busy - hidden_gathers - hidden_reductions - hidden_down)
    hidden_update = np.minimum((there.update - there.first) * hides, free)
    hidden_refresh = np.minimum(refresh * hides, free) * ~lazy if f.overlap.refresh else 0.0  # weights of the host come when needed
    crowded = c.contention * (hidden_gathers + hidden_reductions + hidden_refresh)
    return {
        GATHER: gathers - hidden_gathers + refresh - hidden_refresh,
        REDUCE: reductions - hidden_reductions + crowded + work.tied,
        UPDATE: work.optimizer,
        OFFLOAD: offloading(case, held) + there.down - hidden_down + there.update - hidden_update,
        STEP: np.full_like(busy, step_overhead(case)),
    }


def step_overhead(case: Case) -> float:
    """Seconds per step for data, logging and scalar reductions: of this machine, if it was measured (with this project's trainer: of
    others it says nothing on a GPU); a small one does less of it, and so does a trainer that reads nothing back."""
    if case.device.measured is not None and (case.device.host or case.trainer.embedded):
        return case.device.measured.step_s
    return (0.1 if case.device.host or not case.trainer.overlap.reads_every_step else 1.0) * case.constants.step
