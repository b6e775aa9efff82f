"""Short words and round numbers for tables, charts and run names. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def layout_label(layout: Mapping[str, Any]) -> str:
    """``t2 p2x2 d1 mb4 interleaved sp zero-1``: tensor, pipeline x virtual, data, micro-batch, and whatever is not the default."""
    if not layout:
        return "-"
    pipeline, virtual = layout.get("pipeline", 1), layout.get("virtual_pipeline", 1)
    words = [f"t{layout.get('tensor', 1)}", f"p{pipeline}" + (f"x{virtual}" if virtual > 1 else ""), f"d{layout.get('data') or '?'}"]
    further = {"c": "context", "e": "expert", "et": "expert_tensor"}
    words += [f"{letter}{layout[axis]}" for letter, axis in further.items() if layout.get(axis, 1) > 1]
    words.append(f"mb{layout.get('micro_batch', 1)}")
    if pipeline > 1:
        words.append(str(layout.get("schedule", "1f1b")).replace("_", "-"))
    words += [f"s{layout['slices']}"] * (layout.get("slices", 1) > 1)
    if layout.get("sequence_parallel"):
        words.append("sp")
    if layout.get("recompute", "none") != "none":
        words.append(f"recompute-{layout['recompute']}")
    return " ".join([*words, *_sharding_words(layout)])


def _sharding_words(layout: Mapping[str, Any]) -> list[str]:
    """The point of the sharding space by its common name, where it has one."""
    sharding, data = layout.get("sharding") or {}, (layout.get("data") or 1) * layout.get("context", 1)
    factors = tuple(sharding.get(state, 1) for state in ("params", "grads", "optimizer"))
    names = {(1, 1, data): "zero-1", (1, data, data): "zero-2", (data, data, data): "zero-3"}
    words = [] if set(factors) == {1} else [names.get(factors, "shard-" + "/".join(map(str, factors)))]
    return words + ([f"offload-{share:g}"] if (share := sharding.get("offload", 0)) else [])


def seconds(value: float | None) -> str:
    """``1.23 s``, ``45.6 ms``; three digits that matter, ``-`` when unknown."""
    if not value:
        return "-" if value is None else "0"
    scale, unit = next(((scale, unit) for scale, unit in ((1.0, "s"), (1e-3, "ms")) if value >= scale), (1e-6, "µs"))
    return f"{_three(value / scale)} {unit}"


def duration(value: float) -> str:
    """Seconds as ``45 minutes``, ``12.3 hours`` or ``4.56 days``."""
    scale, unit = next(((scale, unit) for scale, unit in ((172800.0, "days"), (3600.0, "hours")) if value >= scale), (60.0, "minutes"))
    return f"{_three(value / min(scale, 86400.0))} {unit}"


def interval(ends: tuple[float, float] | None) -> str:
    """``1.02-1.31 s``, in one unit where that shows both; ``-`` when unknown."""
    if ends is None:
        return "-"
    low, high = ends
    scale, unit = next(((scale, unit) for scale, unit in ((1.0, "s"), (1e-3, "ms")) if high >= scale), (1e-6, "µs"))
    if low < 0.1 * scale:
        return f"{seconds(low)}-{seconds(high)}"
    return f"{_three(low / scale)}-{_three(high / scale)} {unit}"


def spread(value: float | None, median: float | None) -> str:
    """The interquartile range as a share of the median: ``±1.2 %`` is half of it to either side."""
    return "" if value is None or not median else f"±{50 * value / median:.1f} %"


def amount(value: float | None) -> str:
    """``4.12 k``, ``1.30 M``: plain counts and rates."""
    if value is None:
        return "-"
    for scale, letter in SCALES:
        if value >= scale:
            return f"{_three(value / scale)} {letter}"
    return _three(value)


def memory(value: float | None) -> str:
    """Bytes as ``1.23 GB`` (1e9 bytes)."""
    return "-" if value is None else f"{amount(value)}B" if value >= 1e3 else f"{value:.0f} B"


def percent(value: float | None, signed: bool = False, digits: int = 1) -> str:
    """A ratio as ``12.3 %``."""
    return "-" if value is None else f"{100 * value:{'+' if signed else ''}.{digits}f} %"


def one_line(words: object, longest: int | None = None) -> str:
    """Text on one line without control characters; of text longer than ``longest``, beginning and end."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(words)).split())
    if longest is None or len(text) <= longest:
        return text
    return f"{text[: longest // 2]}…{text[-(longest - longest // 2 - 1) :]}"


def shown(words: object) -> str:
    """Text as a terminal may have it: what would steer the terminal is a question mark, lines stay lines."""
    text = str(words)
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else " " if c.isspace() else "?" for c in text)


def money(value: float | None) -> str:
    """``1,234.50``: an amount to the cent; three digits that matter below one. ``-`` when unknown."""
    if value is None:
        return "-"
    return f"{value:,.2f}" if value >= 1 or not value else f"{value:.3g}"


def spent(costs: Sequence[tuple[float | None, float | None]]) -> str:
    """``3 trials took 12.3 GPU-hours, 24.60``: the sum over trials, each given by its GPU-hours and their price."""
    hours, price = (sum(each or 0.0 for each in one) for one in zip(*costs)) if costs else (0.0, 0.0)
    return f"{plural(len(costs), 'trial')} took {amount(hours)} GPU-hours" + (f", {money(price)}" if price else "")


def plural(count: int, word: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{count} {word}" + ("" if count == 1 else "s")


def error_of(predicted: float | None, measured: float | None) -> float | None:
    """Relative error of a prediction: +0.1 says that it was 10 % too high."""
    return None if predicted is None or not measured else predicted / measured - 1


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
