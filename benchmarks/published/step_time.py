"""What a published row measured, in one unit: seconds of a step.

Sources print step time, tokens or samples per second, TFLOP/s or MFU. The last two are turned into time only where the source's
count of FLOPs is known: what is not known is not guessed. Nor is which of two numbers is right where a row contradicts itself.
"""

from __future__ import annotations

import re

from benchmarks.published.raw import RawRow
from launcher.cost.inputs.shape import Shape

PEAK_TFLOPS = {"A100": 312.0, "A800": 312.0, "H100": 989.0, "H200": 989.0, "V100": 125.0}
"""16-bit peaks that sources which print MFU divide by."""


AGREES = 2**0.5
"""How far a step time may be from batch, sequence and tokens per second. Of the 223 rows of the calibration table that print all of them
204 agree within 2 % and 19 differ by a factor of two or four; none lies between. A number of another run (half the sequence, twice the
devices) is off by a whole factor, of which the least is two; rounding to one digit, warm-up and other windows of averaging are not. This
is the middle."""
FEWER = r"padd|answer|effective"
"""Words of notes by which a rate may count fewer tokens than a step has: that is no contradiction."""


def step_seconds(row: RawRow, shape: Shape | None) -> tuple[float | None, str]:
    """Measured seconds of one step, and what they were made of or why they are not known; None where the row has none, contradicts itself
    or ran out of memory."""
    if row.yes("oom"):
        return None, ""
    if re.search(r"deterministic mode", row.notes, re.IGNORECASE):
        return None, "left out: deterministic kernels and collectives"  # no profile has their times; memory is as ever
    batch, gpus, by_tokens = row.whole("gbs"), row.whole("gpus"), _from_tokens(row)
    if step := row.number_of("step_time_s"):
        if by_tokens and max(step / by_tokens, by_tokens / step) > AGREES and not re.search(FEWER, row.notes, re.IGNORECASE):
            return None, "left out: its tokens/s say another"
        return step, ""
    if not batch:
        return None, ""
    if by_tokens:
        return by_tokens, "from tokens/s"
    if samples := row.number_of("samples_per_s"):
        return batch / samples, "from samples/s"
    return _from_flops(row, batch, gpus, shape)


def _from_tokens(row: RawRow) -> float | None:
    """Seconds of a step by batch, sequence and tokens per second; None where the row lacks one of them."""
    batch, seq, gpus = row.whole("gbs"), row.whole("seq"), row.whole("gpus")
    each, rate = row.number_of("tokens_per_s_per_gpu"), row.number_of("tokens_per_s_total")
    rate = rate or (each * gpus if each and gpus else None)
    return batch * seq / rate if batch and seq and rate else None


def _from_flops(row: RawRow, batch: int, gpus: int | None, shape: Shape | None) -> tuple[float | None, str]:
    """Time from TFLOP/s of executed work (Narayanan et al. 2021, equation 3) or from MFU (attention not halved)."""
    if not gpus or shape is None or row.text("arch") not in ("gpt", "llama"):
        return None, ""
    if row.source.startswith("Megatron-LM SC21") and (rate := row.number_of("tflops_per_gpu")):
        layers, hidden, seq, vocab = shape.layers, shape.hidden, shape.seq, shape.vocab
        work = 96.0 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
        return float(work / (rate * 1e12 * gpus)), "from TFLOP/s"
    mfu, family = row.number_of("mfu_pct"), re.match(r"[A-Z]+\d+", row.text("gpu"))
    if mfu and family and family.group() in PEAK_TFLOPS and row.source.startswith(("Korthikanti", "Vocabulary Parallelism")):
        return float(shape.model_flops() * batch / (mfu / 100 * PEAK_TFLOPS[family.group()] * 1e12 * gpus)), "from MFU"
    return None, ""
