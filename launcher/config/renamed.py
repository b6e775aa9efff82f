"""Keys of hardware files that had another name. What they said is not read silently: one line says what to write."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.shared.run.errors import ConfigError

RENAMED = {"reached_tflops": "sustained_tflops", "older_kernels": "legacy_kernel_factor", "exponentials": "exp_throughput"}


def refuse_renamed(names: Iterable[str], where: str = "cluster.hardware.") -> None:
    """``ConfigError`` for the first of ``names``, keys of the device under ``where``, that has another name now."""
    for name in names:
        if name in RENAMED:
            raise ConfigError(f"{where}{name} is called {RENAMED[name]} now; rename the key in the hardware file or override")
