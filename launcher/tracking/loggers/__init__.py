"""Further copies of a sweep's measurements, made of the same files as MLflow's: one class each, imported when it is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from launcher.config.packages import need
from launcher.trials.store import Sweep
from trainer.shared.run.errors import ConfigError

FOLDER = "exports"
"""Folder of all loggers' files, next to the trials."""


class SweepLogger(ABC):
    """Keeps one copy of a sweep up to date in ``folder``."""

    def __init__(self, folder: Path):
        self.folder = folder

    @abstractmethod
    def update(self, sweep: Sweep) -> None:
        """Brings the copy up to date with the disk. It may be killed, repeated and run late."""


@dataclass(frozen=True)
class LoggerKind:
    """Names the class of a logger in a module of this folder, and the extra of pyproject.toml whose package it needs."""

    module: str
    name: str
    extra: str | None = None


LOGGERS = {
    "csv": LoggerKind("tables", "CsvLogger"),
    "parquet": LoggerKind("tables", "ParquetLogger", "parquet"),
    "tensorboard": LoggerKind("tensorboard", "TensorboardLogger", "tensorboard"),
    "wandb": LoggerKind("wandb", "WandbLogger", "wandb"),
}


def check_loggers(names: Sequence[str], key: str = "tracking.loggers") -> None:
    """Raises ``ConfigError`` for an unknown logger, and for one whose package is not installed, with the command that installs it."""
    for name in names:
        if name not in LOGGERS:
            raise ConfigError(f"{key}={name!r} is not a logger; use {', '.join(LOGGERS)}")
        if (extra := LOGGERS[name].extra) is not None:
            need(extra, f"{key}={name}")


def open_logger(name: str, root: Path, sweep: str) -> SweepLogger:
    """Returns the logger of a sweep of the folder of trials ``root``."""
    kind = LOGGERS[name]
    made: SweepLogger = getattr(import_module(f"{__name__}.{kind.module}"), kind.name)(root / FOLDER / sweep / name)
    return made
