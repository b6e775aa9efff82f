"""The cost model against a table of measurements: which rows it can answer, and how well, by source and by sweep."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.config.schema import HardwareConfig
from launcher.config.trainer import TrainerProfile
from launcher.cost.constants import FITTED, Constants
from launcher.tables.accuracy import Errors, Verdicts, correlation, regret
from launcher.tables.answers import Answer, answers
from launcher.tables.measured import peak_bytes, step_seconds
from launcher.tables.published import Row
from launcher.tables.questions import Question, Unanswerable, question

MIN_SWEEP = 5
"""Measured rows that make a sweep worth ranking."""


@dataclass(frozen=True)
class Judged:
    """One row, its prediction if there is one, and what was measured."""

    row: Row
    question: Question | None
    answer: Answer | None
    reason: str  # why there is no prediction
    step_seconds: float | None
    peak_bytes: float | None

    @property
    def whole(self) -> bool:
        """A dense model with every cell that the prediction rests on."""
        cells = ("layers", "hidden", "seq", "gpu", "gpus", "tp", "pp", "mbs", "gbs", "recompute")
        return self.row.text("arch") in ("gpt", "llama") and all(self.row.text(name) for name in cells)

    @property
    def comparable(self) -> bool:
        """Such a row in 16 bits on a V100, A100 or H100 without context parallelism: what public cost models were scored on."""
        narrow = self.question is not None and bits(self.question.precision) == "16" and self.question.layout["context"] == 1
        return self.whole and narrow and self.row.text("gpu").startswith(("V100", "A100", "H100"))


@dataclass(frozen=True)
class Sweep:
    """Rows that differ in layout only, ranked."""

    name: str
    count: int
    correlation: float | None
    regret: float
    errors: Errors


@dataclass(frozen=True)
class Summary:
    """The figures of a selection of rows."""

    rows: int
    predicted: int
    time: Errors | None
    memory: Errors | None
    verdicts: Verdicts | None
    sweeps: tuple[Sweep, ...]

    @property
    def correlation(self) -> float | None:
        """Mean over the sweeps."""
        known = [s.correlation for s in self.sweeps if s.correlation is not None]
        return statistics.fmean(known) if known else None

    @property
    def regret(self) -> float | None:
        """Mean over the sweeps."""
        return statistics.fmean(s.regret for s in self.sweeps) if self.sweeps else None


def judge(
    rows: Sequence[Row], hardware: dict[str, HardwareConfig], constants: Constants = FITTED, trainer: TrainerProfile | None = None
) -> list[Judged]:
    """Every row with its prediction, or the reason why it has none. ``trainer`` replaces the rows' own."""
    asked: dict[int, Question] = {}
    reasons: dict[int, str] = {}
    for row in rows:
        try:
            asked[row.number] = question(row, hardware, trainer)
        except Unanswerable as why:
            reasons[row.number] = str(why)
    found = dict(zip(asked, answers(list(asked.values()), constants)))
    return [
        Judged(row, asked.get(row.number), found.get(row.number), reasons.get(row.number, ""), step_seconds(row), peak_bytes(row))
        for row in rows
    ]


def summary(judged: Sequence[Judged]) -> Summary:
    """All figures of a selection."""
    known = [j for j in judged if j.answer is not None]
    times = [(j.answer.step_time_s, j.step_seconds) for j in known if j.answer and j.step_seconds]
    sizes = [(j.answer.reported_bytes, j.peak_bytes) for j in known if j.answer and j.peak_bytes]
    flags = [told for j in known if (told := _verdict(j)) is not None]
    return Summary(len(judged), len(known), Errors.of(times), Errors.of(sizes), Verdicts.of(flags) if flags else None, tuple(sweeps(known)))


def _verdict(judged: Judged) -> tuple[bool, bool, float, float] | None:
    flag, answer = judged.row.yes("oom"), judged.answer
    if flag is None or answer is None or judged.question is None:
        return None
    return answer.fits < 0.5, flag, answer.reported_bytes, answer.memory_bytes / judged.question.device.memory


def by_source(judged: Sequence[Judged]) -> dict[str, Summary]:
    """Figures of each source, in order of appearance."""
    groups: dict[str, list[Judged]] = defaultdict(list)
    for j in judged:
        groups[j.row.source or "(no source)"].append(j)
    return {source: summary(members) for source, members in groups.items()}


def unanswered(judged: Sequence[Judged]) -> Counter[str]:
    """How many rows have no prediction, by reason."""
    return Counter(j.reason for j in judged if j.answer is None)


def sweeps(judged: Sequence[Judged]) -> list[Sweep]:
    """Groups of one model, sequence length and cluster with enough measured rows and three different layouts."""
    groups: dict[tuple[str, ...], list[Judged]] = defaultdict(list)
    keys = ("model", "layers", "hidden", "heads", "ffn", "vocab", "seq", "gpu", "gpus")
    for j in judged:
        if j.answer and j.question and j.step_seconds and all(j.row.text(name) for name in ("tp", "pp", "mbs")):
            width = bits(j.question.precision) if j.row.text("precision") else ""
            groups[(j.row.source.split(" (")[0], *(j.row.text(key) for key in keys), width)].append(j)
    ranked = (_ranked(members) for members in groups.values() if len(members) >= MIN_SWEEP)
    return [sweep for sweep in ranked if sweep is not None]


def bits(precision: str) -> str:
    """Formats of one width are compared with each other."""
    return {"fp4": "4", "fp8": "8", "fp32": "32", "fp64": "64"}.get(precision, "16")


LAYOUT = ("tp", "pp", "cp", "virtual_pp", "mbs", "gbs", "recompute", "sequence_parallel", "zero_stage_or_sharding")


def _ranked(members: list[Judged]) -> Sweep | None:
    if len({(*(j.row.text(name) for name in LAYOUT), j.row.kernel) for j in members}) < 3:
        return None
    measured = [j.step_seconds / _tokens(j) for j in members if j.step_seconds]
    predicted = [j.answer.step_time_s / _tokens(j) for j in members if j.answer]
    row = members[0].row
    name = f"{row.source.split(' (')[0]}: {row.text('model')} seq {row.text('seq')} on {row.text('gpus')} {row.text('gpu').split('-')[0]}"
    errors = Errors.of(list(zip(predicted, measured)))
    assert errors is not None
    return Sweep(name, len(members), correlation(predicted, measured), regret(predicted, measured), errors)


def _tokens(judged: Judged) -> float:
    """Tokens of one step: sweeps may vary the batch."""
    assert judged.question is not None
    return judged.question.global_batch * float(judged.question.shape.seq)
