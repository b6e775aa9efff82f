"""A step's timeline as a picture: one row per pipeline rank, one bar per computation. Plain SVG, made of text. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from launcher.cost.timeline import Timeline
from trainer.layout.schedule import Kind
from trainer.layout.simulate import Span, idle_fraction, makespan

WIDTH, ROW, TOP, LEFT = 1400, 26, 56, 64
COLOURS = {Kind.FORWARD: "#4c78a8", Kind.BACKWARD: "#f2a541", Kind.INPUT_GRAD: "#f2a541", Kind.WEIGHT_GRAD: "#72a98f"}
WORDS = {"forward": Kind.FORWARD, "backward (of the input)": Kind.BACKWARD, "backward of the weights": Kind.WEIGHT_GRAD}


def draw(timeline: Timeline, title: str) -> str:
    """The picture. Bars carry the micro-batch in their tooltip, and as text where it fits; chunks differ in shade."""
    end = makespan(timeline.ranks) or 1.0
    height = TOP + ROW * len(timeline.ranks) + 34
    scale = (WIDTH - LEFT - 10) / end
    spans = [(rank, span) for rank, spans in enumerate(timeline.ranks) for span in spans if span.action.kind.computes]
    bars = [_bar(rank, span, scale, timeline.chunks) for rank, span in spans]
    labels = [_text(8, TOP + ROW * rank + 17, f"rank {rank}") for rank in range(len(timeline.ranks))]
    shown = "" if timeline.micro_batches == timeline.of else f" (the first {timeline.micro_batches} of {timeline.of} micro-batches)"
    caption = f"{end:.3g} s of pipeline{shown}, ranks idle {idle_fraction(timeline.ranks):.1%} of it"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            _text(8, 20, title, size=15),
            *_legend(),
            *labels,
            *bars,
            _text(LEFT, height - 10, caption),
            "</svg>",
            "",
        ]
    )


def _bar(rank: int, span: Span, scale: float, chunks: int) -> str:
    action, x, width = span.action, LEFT + span.start * scale, max((span.end - span.start) * scale, 0.3)
    y = TOP + ROW * rank
    shade = 1.0 - 0.55 * action.chunk / max(chunks, 1)
    tip = f"{action.kind.value} of micro-batch {action.micro_batch}, chunk {action.chunk}: {span.start:.4g} to {span.end:.4g} s"
    label = _text(x + 2, y + 15, str(action.micro_batch), size=10) if width > 16 else ""
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW - 4}" fill="{COLOURS[action.kind]}" fill-opacity="{shade:.2f}" '
        f'stroke="white" stroke-width="0.4"><title>{escape(tip)}</title></rect>{label}'
    )


def _legend() -> Iterable[str]:
    for place, (word, kind) in enumerate(WORDS.items()):
        x = LEFT + 200 * place
        yield f'<rect x="{x}" y="32" width="12" height="12" fill="{COLOURS[kind]}"/>'
        yield _text(x + 18, 43, word)


def _text(x: float, y: float, words: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}">{escape(words)}</text>'
