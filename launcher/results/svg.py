"""Just enough SVG: elements with escaped text, scales with round ticks. Colours are classes, so that a page can theme them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH = 960
"""Width of every figure in its own units; the page scales it."""

Words = Callable[[float], str]
"""Function that formats a value at an axis."""


def element(name: str, *children: str, **attributes: object) -> Markup:
    """``<name a="..">children</name>``. Everything is escaped but ``Markup``; ``font_size`` is ``font-size``, ``class_`` is ``class``."""
    given = {key: number(value) if isinstance(value, float) else value for key, value in attributes.items() if value is not None}
    written = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in given.items())
    inner = "".join(escape(child) for child in children)
    return Markup(f"<{name}{written}>{inner}</{name}>" if inner else f"<{name}{written}/>")


def figure(height: float, title: str, parts: Iterable[Markup], width: float = WIDTH) -> Markup:
    """Returns a whole picture, by default of the common width; ``title`` is for screen readers."""
    box = f"0 0 {width:g} {height:g}"
    return element("svg", *parts, xmlns="http://www.w3.org/2000/svg", viewBox=box, role="img", aria_label=title)


def text(x: float, y: float, words: str, class_: str = "", anchor: str | None = None) -> Markup:
    return element("text", words, x=x, y=y, class_=class_ or None, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return element("path", d=f"M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}", class_=class_)


def rectangle(x: float, y: float, width: float, height: float, class_: str, title: str = "") -> Markup:
    inner = [element("title", title)] if title else []
    return element("rect", *inner, x=x, y=y, width=max(width, 0.5), height=height, class_=class_)


def boxes(spans: Iterable[tuple[float, float]], y: float, height: float, class_: str) -> Markup:
    """Many bars of one row and colour as one path: 25 bytes each."""
    path = "".join(f"M{number(a)} {number(y)}h{number(max(b - a, 0.3))}v{number(height)}h-{number(max(b - a, 0.3))}z" for a, b in spans)
    return element("path", d=path, class_=class_)


def polyline(points: Iterable[tuple[float, float]], class_: str, title: str = "") -> Markup:
    path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return element("polyline", *([element("title", title)] if title else []), points=path, class_=class_)


def number(value: float) -> str:
    """A coordinate with one decimal, as short as it can be."""
    return f"{value:.1f}".removesuffix(".0")


@dataclass(frozen=True)
class Scale:
    """From values to a coordinate: ``low`` lies at ``start``, ``high`` at ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    @classmethod
    def over(cls, values: Iterable[float], start: float, end: float, *, zero: bool = False, log: bool = False) -> Scale:
        """A scale that holds all ``values`` with a little room; ``zero``: beginning at 0."""
        known = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [0.1, 1.0]
        low, high = min(known), max(known)
        if log:
            return cls(low / 1.5, high * 1.5, start, end, True)
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        return cls(0.0 if zero else low - room, high + room, start, end)

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(max(value, self.low))
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self, about: int = 6) -> list[float]:
        """Returns round values inside the scale: steps of 1, 2 or 5 times a power of ten, or such numbers on a logarithmic one."""
        if self.log:
            decades = math.log10(self.high / self.low)
            factors = (1, 2, 5) if decades < 3 else (1,)
            every = max(1, math.ceil(decades / about))
            exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1, every)
            return [tick for e in exponents for f in factors if self.low <= (tick := f * 10.0**e) <= self.high]
        rough = (self.high - self.low) / about
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [i * step for i in range(first, last + 1)]


def across_axis(scale: Scale, top: float, bottom: float, words: Words, about: int = 6) -> Markup:
    """Upright grid lines from ``top`` to ``bottom``, a tick's ``words`` below each."""
    marks = [line(scale(t), top, scale(t), bottom + 3, "grid") for t in scale.ticks(about)]
    return element("g", *marks, *(text(scale(t), bottom + 16, words(t), "tick", "middle") for t in scale.ticks(about)))


def up_axis(scale: Scale, left: float, right: float, words: Words, about: int = 5) -> Markup:
    """Level grid lines from ``left`` to ``right``, a tick's ``words`` left of each."""
    marks = [line(left, scale(t), right, scale(t), "grid") for t in scale.ticks(about)]
    return element("g", *marks, *(text(left - 8, scale(t) + 4, words(t), "tick", "end") for t in scale.ticks(about)))
