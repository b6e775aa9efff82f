"""The devices known by name: conf/hardware, and machines that ``trireme doctor`` measured into runs/hardware."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from launcher.config.folders import conf_dir, content, files_of, group_folders
from launcher.config.schema import HardwareConfig
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict

RENAMED = {"reached_tflops": "sustained_tflops", "older_kernels": "legacy_kernel_factor", "exponentials": "exp_throughput"}
"""Former names of keys, with the present ones. A file that still has a former name is refused."""


class HardwareFiles(dict[str, HardwareConfig]):
    """Devices by name. A broken file of a measured device raises its ``ConfigError`` only when that device is asked for."""

    def __init__(self, readable: dict[str, HardwareConfig], broken: dict[str, ConfigError]):
        super().__init__(readable)
        self._broken = broken

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._broken

    def __missing__(self, name: str) -> HardwareConfig:
        raise self._broken.get(name) or KeyError(name)


def hardware_files(own: Path | None = None) -> HardwareFiles:
    """Reads every hardware file, by name, with those of ``own``, the user's own config groups. As in ``hardware=NAME``, a shipped file
    precedes one that was measured here, and that one precedes a file of ``own``."""
    readable, broken = {}, {}
    for path in [path for root in reversed(group_folders(own)[1:]) for path in sorted((root / "hardware").glob("*.yaml"))]:
        try:
            readable[path.stem] = _read(path)
        except ConfigError as error:
            broken[path.stem] = error
    return HardwareFiles(readable | shipped_hardware(), broken)


def shipped_hardware() -> dict[str, HardwareConfig]:
    """Reads the data sheets of conf/hardware, by name."""
    return {name: copy.deepcopy(config) for name, config in _data_sheets().items()}


@cache
def _data_sheets() -> dict[str, HardwareConfig]:
    return {path.stem: _read(path) for path in sorted((conf_dir() / "hardware").glob("*.yaml"))}


def typed(name: str) -> str:
    """Returns what ``hardware=`` takes for the device of this ``name``; the name itself of one that no file has."""
    said = re.compile(rf"^name: *[\"']?{re.escape(name)}[\"']? *$", re.MULTILINE)
    return next((stem for stem, path in files_of("hardware").items() if said.search(path.read_text(errors="replace"))), name)


def _read(path: Path) -> HardwareConfig:
    data = content(path) or {}
    if isinstance(data, dict):
        refuse_renamed(data, f"{path}: ")
    return from_dict(HardwareConfig, data, f"{path}: ")


def refuse_renamed(names: Iterable[str], where: str = "cluster.hardware.") -> None:
    """Raises ``ConfigError`` for the first of ``names``, keys of the device under ``where``, that has been renamed."""
    for name in names:
        if name in RENAMED:
            raise ConfigError(f"{where}{name} is called {RENAMED[name]} now; rename the key in the hardware file or override")
