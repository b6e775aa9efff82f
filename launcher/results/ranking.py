"""One function from measurements to an order. Pure: ``measurements.py`` reads the files.

Trials that finished and were timed come first, by median step time. Everything else follows and is never hidden: under way,
stopped, failed, pruned, each with its reason.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.trials.store import Record
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.records.trial_files import MOST, number, positive

CONFIDENCE = 0.834
"""Confidence of intervals that are compared by overlap: two of 83.4 % touch where the difference of two medians with equal errors is
significant at 5 % (1.39 errors each, 1.39 x 2 = 1.96 x sqrt 2; Goldstein and Healy, J. R. Stat. Soc. A 158, 1995)."""
COMPARED = 5
"""Steps whose losses are compared: later on rounding grows with every step."""
ROUNDING, ROUNDING_16 = 1e-3, 2e-2
"""Relative difference of losses by rounding: fp32 logs print four digits, 16-bit weights have a last place of 0.4 to 0.8 %."""
FULL_PRECISION = re.compile(r'"precision": "fp(32|64)"')
COSTS = ("gpu_hours", "price", "gpu_hours_per_billion_tokens", "price_per_billion_tokens")
"""Names of what a trial took, and of what its layout takes for 1e9 tokens."""
USUAL = ("power limit",)
"""Reasons of a lower clock that mean no fault: a GPU that works hard reaches its limit."""
UNRANKED = (Status.DONE, Status.RUNNING, Status.SUBMITTED, Status.PLANNED, Status.STOPPED, Status.FAILED, Status.PRUNED)
"""Sort order of unranked trials."""


@dataclass(frozen=True)
class Measurement:
    """Holds one trial's figures, in seconds and bytes; invalid numbers are ``None``. ``rank`` sets ``place`` and ``tied_with_best``."""

    trial: str
    status: Status
    reason: Reason | None = None
    detail: str = ""
    layout: Mapping[str, Any] = field(default_factory=dict)
    step_time_s: float | None = None  # median after warm-up
    step_time_spread_s: float | None = None  # interquartile range after warm-up
    step_time_interval_s: tuple[float, float] | None = None  # where the measured steps let the median be
    steps_measured: int = 0  # steps behind the median
    tokens_per_s: float | None = None
    peak_memory_bytes: int | None = None  # of the rank that needs most
    mfu: float | None = None
    energy_per_step_j: float | None = None  # of all GPUs, where NVML says it
    gpu_faults: tuple[str, ...] = ()  # a line for each GPU that was slowed down by a fault, or lost data
    gpu_hours: float | None = None  # of all attempts so far
    price: float | None = None  # of them, by ``cluster.price_per_gpu_hour``
    gpu_hours_per_billion_tokens: float | None = None  # at the median step time
    price_per_billion_tokens: float | None = None
    predicted_step_time_s: float | None = None
    predicted_interval_s: tuple[float, float] | None = None  # 80 % of such predictions hold
    predicted_memory_bytes: int | None = None
    place: int | None = None  # 1 = fastest; None = not measured to the end
    tied_with_best: bool = False
    dir: str | None = None  # the trial's directory; pruned combinations have none
    overrides: tuple[str, ...] = ()
    losses: tuple[float, ...] = ()  # of the first steps
    problem: str = ""  # what decides the losses: trials of one problem must agree
    loss_gap: float | None = None  # largest relative distance of a loss from those of its peers; filled in by ``rank``
    other_model: bool = False  # it is larger than rounding explains: this trial does not train what its peers train

    def __post_init__(self) -> None:
        for name in ("step_time_s", "tokens_per_s", "mfu", "energy_per_step_j", "predicted_step_time_s", *COSTS):
            object.__setattr__(self, name, positive(getattr(self, name)))
        for name in ("peak_memory_bytes", "predicted_memory_bytes"):
            value = positive(getattr(self, name))
            object.__setattr__(self, name, None if value is None else int(value))
        if self.step_time_spread_s != 0:
            object.__setattr__(self, "step_time_spread_s", positive(self.step_time_spread_s))
        if not all(map(positive, self.predicted_interval_s or (0,))):
            object.__setattr__(self, "predicted_interval_s", None)
        low, high = self.step_time_interval_s or (math.inf, 0.0)
        if self.step_time_s is None or not 0 < low <= self.step_time_s <= high < MOST:
            object.__setattr__(self, "step_time_interval_s", None)

    def as_json(self) -> dict[str, Any]:
        """The record that ``trireme rank --json`` prints."""
        names = [name for name in self.__dataclass_fields__ if name not in ("losses", "problem")]
        plain = {name: getattr(self, name) for name in names}
        return plain | {
            "status": self.status.value,
            "reason": self.reason.value if self.reason else None,
            "layout": dict(self.layout),
            "overrides": list(self.overrides),
        }


def pair(value: Any) -> tuple[float, float] | None:
    """Two ends of an interval; ``None`` for anything else that a file may hold."""
    return (value[0], value[1]) if isinstance(value, list) and len(value) == 2 else None


def measurement(record: Record, result: Mapping[str, Any], gpu_hours: float | None = None) -> Measurement:
    """Joins the launcher's ``record`` of a trial with the contents of its ``result.json`` (empty when there is none), and the GPU-hours
    that it took."""
    config = record.config or {}
    predicted = record.predicted or {}
    written, warmup = result.get("step_times_s"), config.get("run", {}).get("warmup_steps", 0)
    times = [seconds for value in written[warmup:] if (seconds := positive(value))] if isinstance(written, list) else []
    return Measurement(
        trial=record.id,
        status=record.status,
        reason=record.reason,
        detail=record.detail or (message if isinstance(message := result.get("message"), str) else ""),
        layout=laid_out if isinstance(laid_out := result.get("layout"), Mapping) else config.get("layout") or {},
        step_time_s=result.get("step_time_s"),
        step_time_spread_s=result.get("step_time_spread_s"),
        step_time_interval_s=_interval(result, times),
        steps_measured=len(times),
        tokens_per_s=result.get("tokens_per_s"),
        peak_memory_bytes=result.get("peak_memory_bytes"),
        mfu=result.get("mfu"),
        energy_per_step_j=result.get("energy_per_step_j"),
        gpu_faults=gpu_faults(result.get("gpus")),
        **costs(record, gpu_hours, positive(result.get("tokens_per_s"))),
        predicted_step_time_s=predicted.get("step_time_s"),
        predicted_interval_s=pair(predicted.get("interval_s")),
        predicted_memory_bytes=predicted.get("memory_bytes"),
        dir=None if record.status is Status.PRUNED else str(record.directory),
        overrides=tuple(record.overrides),
        losses=_first_losses(result.get("losses")),
        problem=problem(config, record.reads),
    )


def _interval(result: Mapping[str, Any], times: Sequence[float]) -> tuple[float, float] | None:
    """Returns the interval of the step time of a ``result`` whose steps after the warm-up took ``times``; of phases, the mean of theirs."""
    phases = result.get("phases")
    if not isinstance(phases, list):
        return median_interval(times) if times else None
    try:
        every = result["step_times_s"]
        spans = [(each["share_of_steps"], every[each["measured_steps"][0] - 1 : each["measured_steps"][1]]) for each in phases]
        low, high = zip(*([share * end for end in median_interval(own)] for share, own in spans))
    except (ArithmeticError, LookupError, TypeError, ValueError):  # damaged, or a step without a time
        return None
    return sum(low), sum(high)


def gpu_faults(gpus: Any) -> tuple[str, ...]:
    """Returns a line for each of a result's ``gpus`` that was slowed down other than by its power limit, or whose memory lost data."""
    lines = []
    for gpu in gpus if isinstance(gpus, list) else ():
        if isinstance(gpu, Mapping):
            reasons = gpu.get("slowed_by")
            known = reasons.items() if isinstance(reasons, Mapping) else ()
            said = [
                f"slowed down by {name} in {100 * share:.0f} % of the readings"
                for name, share in known
                if name not in USUAL and positive(share)
            ]
            if errors := positive(gpu.get("memory_errors")):
                said.append(f"memory errors that could not be corrected: {errors:.0f}")
            if said:
                lines.append(f"rank {gpu.get('rank')} on {gpu.get('host')} ({gpu.get('gpu')}): {'; '.join(said)}")
    return tuple(lines)


def problem(config: Mapping[str, Any], reads: Mapping[str, str] | None = None) -> str:
    """Returns the configuration that decides a run's losses, whatever the layout; ``reads``: digests of its input files."""
    run = {name: config["run"].get(name) for name in ("global_batch", "seed", "precision")} if "run" in config else {}
    run["phases"] = config.get("run", {}).get("phases") or None
    trainer = (config.get("command") or {}).get("trainer")
    tune = config.get("tune") or {}
    reads = {} if trainer else reads  # files that another trainer's command names may tell it the layout
    tuned = [tune, dict(reads or {})] if tune.get("base") or tune.get("method", "full") != "full" or reads else None
    return json.dumps([config.get("model"), config.get("data"), config.get("optimizer"), run, trainer, tuned], sort_keys=True)


def rank(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Order ``measurements``, fastest first, with ``place`` and ``tied_with_best`` filled in.

    Only a trial that is ``done`` and has a positive, finite step time gets a place. Equal times are ordered by trial id,
    so the order does not depend on the order of the input. The best itself is not marked as tied. Trials whose losses are not those of
    their peers (``other_model``) come after all others that were timed.
    """
    everything = compared(measurements)
    timed = [m for m in everything if _is_timed(m)]
    rest = [m for m in everything if not _is_timed(m)]
    timed.sort(key=lambda m: (m.other_model, m.step_time_s, m.trial))
    rest.sort(key=lambda m: (UNRANKED.index(m.status), m.step_time_s or math.inf, m.trial))
    placed = [
        replace(m, place=i, tied_with_best=i > 1 and m.other_model == timed[0].other_model and tied(timed[0], m))
        for i, m in enumerate(timed, start=1)
    ]
    return placed + [replace(m, place=None, tied_with_best=False) for m in rest]


def compared(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Returns them with ``loss_gap`` and ``other_model``, against the median loss: peers differ by rounding alone."""
    everything, peers = list(measurements), defaultdict(list)
    for m in everything:
        if m.status is Status.DONE and m.losses:
            peers[m.problem].append(m.losses)
    medians = {name: [statistics.median(step) for step in zip(*curves)] for name, curves in peers.items() if len(curves) > 1}
    return [_against(m, medians.get(m.problem, [])) if m.status is Status.DONE else m for m in everything]


def agreeing(measurements: Iterable[Measurement]) -> bool:
    """Returns whether most trials with ``compared`` losses agree: then the others are wrong."""
    held = [m for m in measurements if m.loss_gap is not None]
    return 2 * sum(m.other_model for m in held) < len(held)


def _against(m: Measurement, median: Sequence[float]) -> Measurement:
    gaps = [abs(loss - right) / max(abs(loss), abs(right), 1e-9) for loss, right in zip(m.losses, median)]
    gap = max(gaps, default=None)
    return replace(m, loss_gap=gap, other_model=gap is not None and gap > (ROUNDING if FULL_PRECISION.search(m.problem) else ROUNDING_16))


def tied(a: Measurement, b: Measurement) -> bool:
    """Returns whether the intervals of the medians (``median_interval``) overlap. They lie within the measured steps, so trials of which
    every step of one was faster are never tied, and narrow with more steps. Without known steps it is the median alone."""
    if a.step_time_s is None or b.step_time_s is None:
        return False
    (low_a, high_a), (low_b, high_b) = interval(a), interval(b)
    return low_a <= high_b and low_b <= high_a


def interval(m: Measurement) -> tuple[float, float]:
    """Returns the interval of a timed trial's median step time, in seconds."""
    assert m.step_time_s is not None, "only a timed trial has one"
    return m.step_time_interval_s or (m.step_time_s, m.step_time_s)


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The interval that holds the median with ``confidence``, whatever the distribution of ``values``, of which there is one at least.

    The k-th smallest and the k-th largest of n values enclose the median with probability 1 - 2 P(Binomial(n, 1/2) < k); between one k and
    the next the ends are interpolated (Hettmansperger and Sheather, "Confidence intervals based on interpolated order statistics",
    Statistics and Probability Letters 4, 1986). So the interval never reaches beyond the values, one odd value hardly moves it, and it
    narrows with the root of n. Three values or fewer cannot give so much confidence: their whole range is the interval (75 % for three, 50
    % for two).
    """
    ordered, n = sorted(values), len(values)
    outside, k = 0.0, 0  # the probability of fewer than k values below the median
    while 1 - 2 * (more := outside + _half_binomial(n, k)) >= confidence:
        outside, k = more, k + 1
    if k == 0:
        return ordered[0], ordered[-1]
    share = (1 - 2 * outside - confidence) / (2 * (more - outside))
    inward = (n - k) * share / (k + (n - 2 * k) * share)
    low = ordered[k - 1] + inward * (ordered[k] - ordered[k - 1])
    high = ordered[n - k] + inward * (ordered[n - k - 1] - ordered[n - k])
    return low, high


def _half_binomial(n: int, i: int) -> float:
    return math.exp(math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) - n * math.log(2))


def leaders(ranked: Sequence[Measurement]) -> list[Measurement]:
    """The best and all that tie with it; empty when nothing was measured."""
    return [m for m in ranked if m.place == 1 or m.tied_with_best]


def costs(record: Record, gpu_hours: float | None, tokens_per_s: float | None) -> dict[str, Any]:
    """Returns the figures of ``COSTS``; None for those that are not known."""
    per_hour = positive(record.cluster.get("price_per_gpu_hour"))
    billion = None if tokens_per_s is None else record.world_size * 1e9 / tokens_per_s / 3600
    priced = [None if hours is None or per_hour is None else hours * per_hour for hours in (gpu_hours, billion)]
    return dict(zip(COSTS, (gpu_hours, priced[0], billion, priced[1]), strict=True))


def _first_losses(losses: Any) -> tuple[float, ...]:
    """Returns losses of the first steps, up to the first that is not finite; empty if a step has none."""
    found = [number(value) for value in losses[:COMPARED]] if isinstance(losses, list) else []
    known = [loss for loss in found if loss is not None]
    return tuple(itertools.takewhile(math.isfinite, known)) if len(known) == len(found) else ()


def _is_timed(m: Measurement) -> bool:
    return m.status is Status.DONE and m.step_time_s is not None
