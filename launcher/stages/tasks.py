"""Tasks of an evaluation, looked for before anything is started."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from trainer.shared.records.artifacts import FETCHED
from trainer.shared.run.errors import ConfigError, listed, nearest
from trainer.shared.run.files import read_json
from trainer.shared.run.stages import BUILTIN_TASKS


def check_tasks(names: Sequence[str], folder: str | Path | None, planned: Sequence[str] = ()) -> None:
    """``ConfigError`` for a task that is not there and will not be (``planned``), and for one that lacks a file."""
    own, fetched = {}, list(planned)
    if folder is not None:
        own = {path.stem: path for path in sorted(Path(folder).glob("*.yaml"))}
        fetched += (read_json(Path(folder) / FETCHED) or {}).get("tasks", [])
    known = [*BUILTIN_TASKS, *own, *fetched]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"tasks: {name!r} is not there{nearest(name, known)}; use {listed(known)}, name a folder with --tasks-folder, or fetch it "
                f"where there is a network: trireme prepare --tasks {name} --tasks-folder DIR"
            )
        if name in own:
            _check_files(name, own[name])


def _check_files(name: str, path: Path) -> None:
    """The data files that a task's YAML names, by word: its functions are not read here."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tasks: {name} ({path}) cannot be read: {error}; give a file in UTF-8") from None
    for found in re.findall(r"[^\s'\"\[\],{}]+\.(?:jsonl|json|csv|parquet)\b", text):
        if not Path(found).is_file():
            raise ConfigError(f"tasks: {name} ({path}) reads {found}, which is not there; put it there, or correct its path")
