"""GPU-hours and money of trials that are about to run: said before they start, and asked back above ``sweep.confirm_gpu_hours``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from launcher.config.schema import SweepConfig
from launcher.console import say
from launcher.labels import amount, money, plural
from launcher.labels import duration as in_words
from launcher.sweep.run import Point, starts
from launcher.trials.store import Store
from trainer.shared.run.derived import world_size_of
from trainer.shared.run.errors import ConfigError


@dataclass(frozen=True)
class Bill:
    """The predicted work of several runs. ``unknown`` of them have no prediction."""

    gpu_hours: float
    longest_s: float  # of one run
    price: float | None  # None where a cluster has no price
    unknown: int = 0

    def words(self) -> str:
        """``2.3 hours, 18.4 GPU-hours, 36.80``."""
        found = [in_words(self.longest_s)] if self.longest_s else []
        found += [f"{amount(self.gpu_hours)} GPU-hours"] if self.gpu_hours else []
        found += [money(self.price)] if self.price else []
        found += [f"{plural(self.unknown, 'run')} whose hardware is not known (hardware=NAME)"] if self.unknown else []
        return ", ".join(found)


def added_up(runs: Iterable[tuple[float | None, int, float | None]]) -> Bill:
    """Returns the bill of runs, each given by its seconds (None: not predicted), its ranks, and the price of a GPU-hour."""
    found = [*runs]
    known = [(seconds, seconds * ranks / 3600, price) for seconds, ranks, price in found if seconds is not None]
    prices = [hours * price for _, hours, price in known if price is not None]
    whole = sum(prices) if prices and len(prices) == len(known) else None
    return Bill(sum(hours for _, hours, _ in known), max((seconds for seconds, _, _ in known), default=0.0), whole, len(found) - len(known))


def of_points(points: Sequence[Point], settings: SweepConfig) -> Bill:
    """Returns the bill of the trials that a sweep will start: measured ones, and those under way, cost nothing more."""
    store = Store(settings.dir)
    configs = [(point, point.config) for point in points if point.config and starts(point, store.load(point.trial), settings)]
    return added_up(
        (
            None if point.predicted is None else config.run.steps * point.predicted["step_time_s"],
            world_size_of(config.layout),
            config.cluster.price_per_gpu_hour,
        )
        for point, config in configs
    )


def confirm(bill: Bill, limit: float | None, what: str) -> None:
    """Says the bill, and asks whether to start if it exceeds ``limit`` GPU-hours or is not known. Raises ``ConfigError`` without a terminal
    or a yes."""
    if bill.gpu_hours:
        say(f"{what}: {bill.words()}")
    if limit is None or (bill.gpu_hours <= limit and not bill.unknown):
        return
    if sys.stdin.isatty() and sys.stderr.isatty():
        print(f"That is more than sweep.confirm_gpu_hours={limit:g}. Start? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
        raise ConfigError("not started")
    raise ConfigError(
        f"sweep.confirm_gpu_hours={limit:g} and this takes {bill.words()}; to start it, raise sweep.confirm_gpu_hours or set it to null"
    )
