"""Reads the log of another trainer: patterns whose groups carry their unit, checked and applied."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from trainer.shared.records.outcome import Reason
from trainer.shared.run.errors import ConfigError, listed, nearest

SECONDS = {"seconds": 1.0, "milliseconds": 1e-3}
INTERVALS = {f"interval_{name}": unit for name, unit in SECONDS.items()}
"""Times of all steps since the previous line with a time, or of ``COUNT`` steps where the line gives their number."""
COUNT = "interval_steps"
BYTES = {"memory_gb": 1e9, "memory_gib": 2.0**30, "memory_mb": 1e6, "memory_mib": 2.0**20}
_TERMINAL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\0")
THOUSANDS = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_GROUPED = re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?")
_DECIMAL_COMMA = re.compile(r"[-+]?[\d.]+,\d+(e[-+]?\d+)?", re.IGNORECASE)
_FRACTION = re.compile(r"\d|\.\d")
RATES = ("tokens_per_s", "tokens_per_s_per_rank", "samples_per_s")
GROUPS = ("step", "loss", "grad_norm", *SECONDS, *INTERVALS, COUNT, *RATES, *BYTES)
"""Names of groups in the patterns of a log. The unit is part of the name."""
UNITLESS = {"time": listed((*SECONDS, *INTERVALS, *RATES)), "memory": listed(BYTES), "mem": listed(BYTES), "throughput": listed(RATES)}
COMMON_FAILURES = {
    Reason.OUT_OF_MEMORY.value: [r"CUDA out of memory", r"torch\.(cuda\.)?OutOfMemoryError", r"CUDA_ERROR_OUT_OF_MEMORY",
                                 r"HIP out of memory"],
    Reason.HOST_MEMORY.value: [r"\bMemoryError\b", r"DefaultCPUAllocator: can't allocate memory"],
    Reason.CONFIGURATION.value: [
        *(r"error: unrecognized arguments:", r"error: argument .*:", r"error: the following arguments are required"),
        *(r"^Error: (No such option|Invalid value for|Missing option)", r"Could not override '"),
        r"Value '.*' of type '\w+' could not be converted",
        r"Some specified arguments are not used by the HfArgumentParser",
    ],
    Reason.COMMUNICATION.value: [r"NCCL (WARN|error)", r"ncclInternalError", r"DistBackendError", r"Connection (reset|closed) by peer",
                                  r"Watchdog caught collective"],
}  # fmt: skip
"""Messages of the programs that most trainers are built on (PyTorch, NCCL, argparse, click, Hydra, HfArgumentParser). A profile's own
patterns come first."""


def check_patterns(log: list[str], failures: Mapping[str, list[str]], success: str | None, where: str) -> None:
    """Raises ``ConfigError`` for patterns that cannot be read, that name nothing, or whose unit is missing."""
    found: set[str] = set()
    for index, text in enumerate(log):
        groups = set(compiled(text, f"{where}log[{index}]").groupindex)
        for name in sorted(groups - set(GROUPS)):
            raise ConfigError(f"{where}log[{index}]: group {name!r} {_unknown_group(name)}")
        if not groups:
            raise ConfigError(
                f"{where}log[{index}]={text!r} has no named group, so it reads nothing; use (?P<NAME>...) with {listed(GROUPS)}"
            )
        found |= groups
    if not found & {"step", "loss"}:
        raise ConfigError(
            f"{where}log: no pattern has a group 'step' or 'loss', by which a line is known to tell of a step; add (?P<step>\\d+)"
        )
    for reason, patterns in failures.items():
        if reason not in {r.value for r in Reason}:
            raise ConfigError(
                f"unknown key {where}failures.{reason}{nearest(reason, [r.value for r in Reason])}; use {listed(r.value for r in Reason)}"
            )
        for text in patterns:
            compiled(text, f"{where}failures.{reason}")
    if success is not None:
        compiled(success, f"{where}success")


def compiled(text: str, where: str) -> re.Pattern[str]:
    """Compiles a regular expression. Raises ``ConfigError`` if it is invalid."""
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"{where}={text!r} is not a regular expression ({error}); correct it") from None


def plain(line: str) -> str:
    """Removes a terminal's colour and cursor codes, and the zero bytes of UTF-16."""
    return _TERMINAL.sub("", line)


def _unknown_group(name: str) -> str:
    if name in UNITLESS:
        return f"does not say its unit; use {UNITLESS[name]}"
    return f"is not known{nearest(name, GROUPS)}; use {listed(GROUPS)}"


class LogReader:
    """Reads steps from the lines of a log. Groups of a line without ``step`` belong to the step that was named last. Where no pattern has a
    ``step``, every line with a loss is one."""

    def __init__(self, patterns: list[str], tokens_per_step: int, sequences_per_step: int, ranks: int):
        self._patterns = [compiled(text, "trainer.launch.log") for text in patterns]
        self._tokens, self._sequences, self._ranks = tokens_per_step, sequences_per_step, ranks
        self._numbered = any("step" in pattern.groupindex for pattern in self._patterns)
        self._counted = 0
        self.told: dict[str, Any] = {}  # groups of the step that is not complete
        self._came: tuple[int, float] | None = None  # the first step of the last ones that arrived together, and when
        self._before: int | None = None  # the step completed last
        self.peak_memory_bytes: float | None = None

    def take(self, line: str, now: float) -> dict[str, Any] | None:
        """Returns the step that ``line`` completes, by naming the next one: ``{"step", "loss", "grad_norm", "step_time_s"}``; missing
        values are None.

        ``now``: the line's arrival, in seconds of a steady clock. Where the log gives no time, the time between the first lines of two
        steps counts; of steps that arrived together, from a buffer, the first one has the mean since the last arrival, and the others have
        none.
        """
        groups: dict[str, float] = {}
        for pattern in self._patterns:
            if (match := pattern.search(line)) and not _is_cut(match):
                groups |= _numbers({name: text for name, text in match.groupdict().items() if text is not None})
        if not self._numbered and "loss" in groups:
            self._counted += 1
            groups["step"] = self._counted
        done = None
        if "step" in groups and groups["step"] != self.told.get("step"):
            if groups["step"] < self.told.get("step", -1):
                return None  # another rank's line, come late
            done, self.told = self._completed(), {"at": now}
        if self.told or "step" in groups:
            self.told |= groups
        return done

    def rest(self) -> dict[str, Any] | None:
        """Returns the last step of the log, which no other step completes."""
        done, self.told = self._completed(), {}
        return done

    def _completed(self) -> dict[str, Any] | None:
        told = self.told
        if "step" not in told:
            return None
        step = int(told["step"])
        told["seconds_here"] = None if self._came is None else (told["at"] - self._came[1]) / max(step - self._came[0], 1)
        if self._came is None or told["at"] > self._came[1]:
            self._came = (step, told["at"])
        told.setdefault(COUNT, math.nan if self._before is None else step - self._before)
        self._before = step
        for name in BYTES.keys() & told.keys():
            self.peak_memory_bytes = max(self.peak_memory_bytes or 0.0, told[name] * BYTES[name])
        return {"step": step, "loss": told.get("loss"), "grad_norm": told.get("grad_norm"), "step_time_s": self._seconds(told)}

    def _seconds(self, told: Mapping[str, Any]) -> float | None:
        """Returns the step's time; None for 0 or a value that is not finite: a time too short to print must not win."""
        work = {"tokens_per_s": self._tokens, "tokens_per_s_per_rank": self._tokens / self._ranks, "samples_per_s": self._sequences}
        times = [told[name] * unit for name, unit in SECONDS.items() if name in told]
        times += [told[name] * unit / (told[COUNT] or math.nan) for name, unit in INTERVALS.items() if name in told]
        times += [work[name] / (told[name] or math.nan) for name in RATES if name in told]
        seconds = times[0] if times else told["seconds_here"]
        return float(seconds) if seconds is not None and seconds > 0 and math.isfinite(seconds) else None


def _is_cut(match: re.Match[str]) -> bool:
    """Returns True where the number of a step is only the beginning of another one: ``step: 120`` of ``step: 120.05``, milliseconds."""
    end = match.end("step") if "step" in match.re.groupindex else -1
    return end > 0 and _FRACTION.match(match.string, end) is not None


def _numbers(found: Mapping[str, str]) -> dict[str, float]:
    """Returns the numbers that one pattern read; none if its step is not a number, since the words stand for something else there. A loss
    or gradient norm that is not a number is left out; a time is kept as NaN. Raises ``ConfigError`` for a decimal comma."""
    numbers = {name: _number(name, text) for name, text in found.items()}
    step = numbers.get("step", 0.0)
    if step is None or not math.isfinite(step):
        return {}
    return {
        name: math.nan if number is None else number
        for name, number in numbers.items()
        if number is not None or name not in ("loss", "grad_norm")
    }


def _number(name: str, text: str) -> float | None:
    """Parses ``1,234.5``, ``11.5K``, ``nan``; returns None for anything else. A comma that does not separate thousands would be
    ambiguous."""
    digits, factor = text.strip().rstrip(",;"), 1.0
    if digits[-1:] in THOUSANDS and digits[-1:]:
        digits, factor = digits[:-1], THOUSANDS[digits[-1]]
    if _GROUPED.fullmatch(digits):
        digits = digits.replace(",", "")
    elif _DECIMAL_COMMA.fullmatch(digits):
        raise ConfigError(
            f"trainer.launch.log: {name}={text!r} has a decimal comma, and commas are read as those of thousands (1,234.5); let "
            "the trainer print a point (trainer.launch.environment.LC_ALL=C)"
        )
    try:
        return float(digits) * factor
    except ValueError:
        return None
