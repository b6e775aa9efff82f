"""The state of a rank's GPU by NVML, a library of NVIDIA's driver: its clock, energy, memory errors, and what slows it down.

NVIDIA's package ``nvidia-ml-py`` calls it, and is optional. torch's own functions (``torch.cuda.clock_rate``) import the same package, and
know neither energy nor errors nor reasons. A figure that package, driver or GPU does not give is missing; nothing here ends a run.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

REASONS = {0x04: "power limit", 0x08: "hardware", 0x20: "temperature", 0x40: "temperature (hardware)", 0x80: "power brake"}
"""Reasons of a clock below the highest, by bit of NVML's ``nvmlClocksEventReasons``. The others are a user's or an idle GPU's."""


class GpuMonitor:
    """Asks NVML about one GPU while steps run. ``uuid``: its name there, ``GPU-...``; None for a rank without one."""

    def __init__(self, uuid: str | None):
        self.uuid, self.steps = uuid, 0
        self._nvml: Any = None
        if uuid is not None:
            with contextlib.suppress(Exception):  # no package, no driver, or a device that it does not know: an optional figure
                import pynvml

                pynvml.nvmlInit()
                self._device, self._nvml = pynvml.nvmlDeviceGetHandleByUUID(uuid), pynvml
        self.begin()

    def begin(self) -> None:
        """Starts the figures again: what follows is measured."""
        self.steps, self._reasons = 0, Counter[str]()
        self._clocks: list[int] = []
        self._since, self._energy, self._errors = time.perf_counter(), self._millijoules(), self._memory_errors()

    def sample(self) -> None:
        """Reads clock and reasons; to be called while the GPU computes."""
        clock = self._ask(lambda nvml: nvml.nvmlDeviceGetClockInfo(self._device, nvml.NVML_CLOCK_SM))
        if clock is not None:
            self._clocks.append(clock)
            reasons = self._ask(lambda nvml: nvml.nvmlDeviceGetCurrentClocksEventReasons(self._device)) or 0
            self._reasons.update(name for bit, name in REASONS.items() if reasons & bit)

    def figures(self) -> dict[str, Any]:
        """Returns means since ``begin``: MHz, watts, joules a step, new memory errors that could not be corrected, and for each reason the
        share of readings with it. Without NVML it is empty."""
        if self._nvml is None:
            return {}
        spent, errors, read = _since(self._millijoules(), self._energy), _since(self._memory_errors(), self._errors), len(self._clocks)
        known = {
            "clock_mhz": sum(self._clocks) / read if read else None,
            "most_clock_mhz": self._ask(lambda nvml: nvml.nvmlDeviceGetMaxClockInfo(self._device, nvml.NVML_CLOCK_SM)),
            "power_w": None if spent is None else spent / 1000 / (time.perf_counter() - self._since),
            "energy_per_step_j": None if spent is None or not self.steps else spent / 1000 / self.steps,
            "memory_errors": errors,
        }
        slowed = {name: count / read for name, count in sorted(self._reasons.items())}
        return {"gpu": self.uuid, "host": socket.gethostname(), **{k: v for k, v in known.items() if v is not None}, "slowed_by": slowed}

    def _millijoules(self) -> int | None:
        return self._ask(lambda nvml: nvml.nvmlDeviceGetTotalEnergyConsumption(self._device))

    def _memory_errors(self) -> int | None:
        return self._ask(
            lambda nvml: nvml.nvmlDeviceGetTotalEccErrors(self._device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        )

    def _ask(self, question: Callable[[Any], int]) -> int | None:
        """Returns the answer; None where this driver or GPU has none."""
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                return question(self._nvml)
        return None


def of_all_gpus(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the part of a result about GPUs, of every rank's ``figures``: each GPU by its lowest rank, joules of a step and errors of all
    together, the lowest clock. Without NVML it is empty."""
    gpus = {own["gpu"]: {"rank": rank, **own} for rank, own in reversed(list(enumerate(figures))) if own}
    if not gpus:
        return {}
    every = sorted(gpus.values(), key=lambda gpu: gpu["rank"])
    found = {name: [gpu[name] for gpu in every if name in gpu] for name in ("energy_per_step_j", "power_w", "memory_errors", "clock_mhz")}
    whole = {name: values for name, values in found.items() if len(values) == len(every)}  # a sum of some would mislead
    added: dict[str, float] = {name: sum(whole[name]) for name in ("energy_per_step_j", "power_w") if name in whole}
    if "memory_errors" in whole:
        added["gpu_memory_errors"] = sum(whole["memory_errors"])
    if "clock_mhz" in whole:
        added["gpu_clock_mhz"] = min(whole["clock_mhz"])
    return {"gpus": every, **added}


def _since(now: int | None, then: int | None) -> int | None:
    return None if now is None or then is None else now - then
