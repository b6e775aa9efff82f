"""Environment variables that are the launcher's own: given by a configuration, they would be overwritten or misread."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.spec import ConfigError

OF_RANKS = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
"""By which the ranks know themselves and meet."""


def refuse_own(key: str, names: Iterable[str], own: Iterable[str] = OF_RANKS) -> None:
    """``ConfigError`` on the first of ``names``, which ``key`` gives, that is one of ``own``. Pure."""
    for name in names:
        if name in own:
            raise ConfigError(
                f"{key} has {name}, which is the launcher's own: it starts the ranks of a trial by it; remove it, or rename it"
            )
