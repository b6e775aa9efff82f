"""Time of requests and throughput of a served model: static batches, a closed loop of requests in flight, open arrivals.

Static: a batch is read, then decoded token by token; with a pipeline it is cut into groups that follow each other. An engine of continuous
batching, which has a batch that is larger than its room, serves it in waves. Continuous: requests
join and leave, so that each token of a running request also waits for a share of the prompts of those that join. With b running requests
b/o of them begin in every step, so that on average a step takes

    decode(b, i + o/2) + share b/o prefill(i)

(Little's law), and the first token waits for the other share of the b prompts. All of them are waited for once; when is a matter of how the
requests began. Where prompts go first, requests of one length that begin together stay together, and the share is one half (``waves``);
where they are mixed with decoding, requests drift apart (``staggered``). The prompts that are read together with a request's own are waited
for before its first token. Open arrivals at rate r: the b with b = r times the time that a request stays; they begin apart, and so do those
of our own generator's closed loop: the share is one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from launcher.cost.inference import memory
from launcher.cost.inference.case import InferenceCase, group
from launcher.cost.inference.passes import Load, choosing, forward, telling
from launcher.cost.inputs.shape import Array
from launcher.cost.parts import Parts, add, scale, total

BUBBLE, SCHEDULING, OTHERS, QUEUE = "pipeline bubble", "scheduling", "prompts of other requests", "queue"
MOST_RUNNING = 2.0**20
"""Requests of a replica that run at once, where no memory bounds them (a host whose memory is not known)."""


@dataclass(frozen=True)
class InferenceEstimate:
    """Arrays over layouts. ``prompt`` are the seconds to the first token by part, ``step`` those of each further one; ``prompt_light``
    and ``step_light`` the same at the speed of light. ``memory`` are bytes of the fullest rank by part, ``room`` the requests that fit."""

    prompt: Parts
    step: Parts
    prompt_light: Parts
    step_light: Parts
    memory: Parts
    fits: np.ndarray
    room: np.ndarray
    running: np.ndarray  # requests of a replica that are decoded together
    output: Array
    arriving: np.ndarray  # requests in flight of a replica, those that wait among them
    replicas: np.ndarray

    @property
    def ttft(self) -> np.ndarray:
        """Seconds to the first token."""
        return np.asarray(total(self.prompt))

    @property
    def tpot(self) -> np.ndarray:
        """Seconds per further token."""
        return np.asarray(total(self.step))

    @property
    def latency(self) -> np.ndarray:
        """Seconds of a request."""
        return np.asarray(self.ttft + (self.output - 1) * self.tpot)

    @property
    def throughput(self) -> np.ndarray:
        """Requests per second over all replicas."""
        return np.asarray(self.replicas * self.arriving / self.latency)


def static(case: InferenceCase) -> InferenceEstimate:
    """Batches that begin and end together. Requests beyond the room of an engine of continuous batching wait for those before them: the
    batch is served in as few waves as it takes, of equal size. An engine of static batches would run out of memory."""
    running, waves = case.batch, np.ones_like(case.batch)
    if case.engine.batching == "continuous":
        waves = np.ceil(case.batch / np.clip(memory.room(case), 1.0, case.batch))
        running = case.batch / waves
    prompt, step = _static(case, running)
    light = _static(case.at_light(), running)
    for first, further in ((prompt, step), light):
        first[QUEUE] = (waves - 1) * _stay(case, first, further)
    return _estimate(case, (prompt, step), light, running, case.batch, memory.fits(case, running))


def _static(case: InferenceCase, b: np.ndarray) -> tuple[Parts, Parts]:
    p = case.pipeline
    of_prompts, of_tokens = group(case, case.input, b), group(case, 1.0, b)
    prompt = through(forward(case, Load(of_prompts, case.input)), b / of_prompts, p, True)
    decoded = forward(case, Load(running=of_tokens, context=case.context))
    step = through(decoded, b / of_tokens, p, case.engine.pipeline_drains)
    chosen, once = choosing(case, b), 0.0 if case.costs else case.constants.request
    prompt, step = add(prompt, chosen), add(step, chosen)
    begun = {SCHEDULING: telling(case, 1.0) + once + turn(case, b, total(prompt))}
    further = {SCHEDULING: telling(case, 0.0) + turn(case, b, total(step))}
    return scale(add(prompt, begun), case.crowding), scale(add(step, further), case.crowding)


def turn(case: InferenceCase, rows: Array, device: Array) -> np.ndarray:
    """Seconds of the host that the device waits for between two passes, of which one chooses a token for ``rows`` requests and takes
    ``device`` seconds. An asynchronous host works on its requests during the next pass, as long as that lasts. 0 in an engine of static
    batches, which has none to schedule, and where ``telling`` was measured."""
    c, nothing = case.constants, np.zeros_like(case.tensor)
    if case.engine.batching == "static" or case.costs is not None:
        return nothing
    whole = c.step + c.row * rows + nothing
    return np.maximum(c.step * (1 - c.step_hidden), whole - device) if case.engine.asynchronous else whole


def through(one: Parts, groups: Array, stages: np.ndarray, drains: bool) -> Parts:
    """Seconds of ``groups`` that follow each other through a pipeline, by those of ``one`` through all its stages: as many turns of a
    stage as there are groups, or stages if those are more; where it empties, the last group's way through the others comes on top."""
    turns = np.maximum(groups, stages) / stages
    idle = (groups + stages - 1) / stages - turns if drains else 0.0
    return scale(one, turns) | {BUBBLE: total(one) * idle}


def closed(case: InferenceCase) -> InferenceEstimate:
    """``batch`` requests in flight per replica: one that ends is followed by the next. Those beyond the room wait; our own generator lets
    none wait, and spreads them out."""
    own = case.engine.own
    running = case.batch if own else np.clip(case.batch, 1.0, np.maximum(memory.room(case), 1.0))
    prompt, step = _running(case, running, own, itself=True)
    light = case.at_light()
    prompt[QUEUE] = (case.batch / running - 1) * _stay(case, prompt, step)
    fits = memory.fits(case, running if own else 1.0)
    return _estimate(case, (prompt, step), _running(light, running, own, itself=True), running, case.batch, fits)


def _stay(case: InferenceCase, prompt: Parts, step: Parts) -> np.ndarray:
    """Seconds from the first pass of a request to its last token."""
    return np.asarray(total(prompt) + (case.output - 1) * total(step))


def opened(case: InferenceCase, rate: Array) -> InferenceEstimate:
    """Requests arrive at ``rate`` per second over all replicas. Where they are more than a replica serves, ``fits`` is 0."""
    room, each = np.clip(memory.room(case), 1.0, MOST_RUNNING), rate / case.replicas
    low, high = np.zeros_like(room), room
    for _ in range(40):
        middle = (low + high) / 2
        enough = middle >= each * _held(case, *_running(case, middle, True))
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    prompt, step = _running(case, high, True)
    busy = np.minimum(step[OTHERS] / total(step), 0.999)  # part of the time in which prompts are read
    prompt[QUEUE] = busy / (2 * (1 - busy)) * step[OTHERS] * case.output / high  # Pollaczek and Khinchine: prompts of equal length
    stay = _stay(case, prompt, step)
    kept = np.where(room * 1.001 >= each * _held(case, prompt, step), 1.0, 0.0)
    arriving = np.where(kept > 0, each * stay, high)
    fits = memory.fits(case, np.ceil(high)) * kept
    return _estimate(case, (prompt, step), _running(case.at_light(), high, True), high, arriving, fits)


def _held(case: InferenceCase, prompt: Parts, step: Parts) -> np.ndarray:
    """Seconds for which a request is among those that run: no fewer turns than it has tokens."""
    each = total(step)
    return np.asarray(np.maximum(total(prompt), each) + (case.output - 1) * each)


def _running(case: InferenceCase, running: np.ndarray, apart: bool, itself: bool = False) -> tuple[Parts, Parts]:
    """The parts of a first and of a further token while ``running`` requests of a replica are decoded. ``apart``: they began at different
    times, so that all prompts of a turn are waited for, and only they are read together; else as many together as a pass takes.
    ``itself``: a request is one of those that run, whose prompt it does not wait for a second time; one that arrives at random meets as
    many as run on average (Sevcik & Mitrani 1981, and Wolff 1982)."""
    c, engine, p = case.constants, case.engine, case.pipeline
    each = np.maximum(running / np.minimum(p, np.maximum(running, 1.0)), 1.0)
    decoding = Load(running=each, context=case.context)
    step = add(forward(case, decoding), choosing(case, each))
    together = np.clip(engine.prefill_tokens / case.input, 1.0, np.maximum(each, 1.0))
    if apart:
        together = np.clip(each / case.output, 1.0, together)
    read = add(forward(case, Load(together, case.input)), choosing(case, together))
    if engine.prefill == "mixed":
        mixed = forward(case, Load(together, case.input, each, case.context))
        further, share = total(mixed) - total(forward(case, decoding)) + total(choosing(case, together)), c.staggered
    else:
        further, share = total(read), c.waves
    begun = running / together / case.output  # passes of prompts in a turn
    if apart:
        share = 1.0
    if itself:
        begun = begun * np.maximum(1 - together / np.maximum(running, 1.0), 0.0)
    host = telling(case, np.minimum(running / case.output, 1.0)) + turn(case, each, total(step))
    step |= {OTHERS: share * begun * further / p, SCHEDULING: host}
    first = add(forward(case, Load(np.ones_like(p), case.input)), choosing(case, np.ones_like(p)))
    beside = (1 - 1 / together) * total(read)
    before = (1 - share) * np.maximum(running / together - 1, 0.0) * further / p
    first |= {OTHERS: beside + before + step[OTHERS], SCHEDULING: host + (total(step) - step[OTHERS]) / 2, QUEUE: np.zeros_like(host)}
    return scale(first, case.crowding), scale(step, case.crowding)


def _estimate(
    case: InferenceCase, found: tuple[Parts, Parts], light: tuple[Parts, Parts], running: np.ndarray, arriving: np.ndarray, fits: np.ndarray
) -> InferenceEstimate:
    sizes = memory.needed(case, running)
    return InferenceEstimate(*found, *light, sizes, fits, memory.room(case), running, case.output, arriving, case.replicas)
