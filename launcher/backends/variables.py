"""Names of the environment variables that a cluster's configuration gives to the ranks, checked before anything is started. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable

from trainer.shared.run.errors import ConfigError

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which a rank knows its place and finds its peers, as torchrun names them."""


def check_names(key: str, names: Iterable[str], own: Container[str]) -> None:
    """Raises ``ConfigError`` for the first of ``names``, given by ``key``, that is invalid in a shell or one of the launcher's ``own``."""
    for name in names:
        if not name.isidentifier() or not name.isascii():
            raise ConfigError(f"{key} has {name!r}, which cannot name an environment variable; use letters, digits and '_'")
        if name in own:
            raise ConfigError(
                f"{key} has {name}, which is the launcher's own: it starts the ranks of a trial by it; remove it, or rename it"
            )
