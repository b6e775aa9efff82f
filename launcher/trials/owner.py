"""The mark of a folder of trials: other folders may run the same trial and track it on the same server."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainer.shared.run.schema import TrainConfig


def owned(run: TrainConfig, root: Path) -> TrainConfig:
    """``run`` with the mark of the folder ``root``, if a server tracks it: others may run the same trial and track it there too."""
    if run.tracking.uri is None:
        return run
    return replace(run, tracking=replace(run.tracking, owner=owner_of(root)))


def owner_of(root: Path) -> str:
    """The folder's mark: 12 hexadecimal digits, drawn when first asked for, the same ever after."""
    path = root / "mlflow.owner"
    if not path.exists():
        root.mkdir(parents=True, exist_ok=True)
        drawn = root / f".mlflow.owner.{os.getpid()}"
        drawn.write_text(secrets.token_hex(6))
        with suppress(FileExistsError):
            os.link(drawn, path)  # of several launchers that start at once the first decides
        drawn.unlink()
    return path.read_text()
