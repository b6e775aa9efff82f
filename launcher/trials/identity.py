"""Defines when two trials are the same.

A trial's id is a hash of everything that can change its result or its speed: its configuration, and the content of files that a tuning
reads (``digests``). A prepared corpus and files of another trainer's command count by path; a change since a measurement is reported.
Excluded, because another value would measure the same:

- ``tracking``: where measurements are mirrored;

- ``cluster.hardware`` but its name: rates are the cost model's input, and calibration changes them during a search (peak and memory reach
the trainer in ``run``);

- the cluster's ``passing`` keys: how patiently, how many at once, at whose expense.

Examples, their tokenizer and a tuned checkpoint may change at the same path, so whole files are hashed (a checkpoint by its manifest), once
as long as size and time stay. Files that only pods have are unknown here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

from launcher.config.rules import run_of
from launcher.config.schema import Config
from trainer.shared.corpora.index import INDEX, TOKENIZER
from trainer.shared.corpora.sources import STDLIB
from trainer.shared.records.artifacts import CHECKPOINT_MANIFEST, newest_checkpoint
from trainer.shared.records.named_tokens import NAMING
from trainer.shared.run.derived import FIRST_KEYS, resolve_model
from trainer.shared.run.files import read_json
from trainer.shared.run.optimizer import GroupsConfig, MuonConfig
from trainer.shared.run.read import to_dict
from trainer.shared.run.schema import ModelConfig, TuneConfig

NEWER_THAN_STAGES: list[tuple[str, str, Any]] = [
    ("run", "context_exchange", "all_gather"), ("optimizer", "stable_steps", 0), ("optimizer", "decay_style", "cosine"),
    ("optimizer", "groups", to_dict(GroupsConfig())), ("optimizer", "kind", "adamw"), ("optimizer", "muon", to_dict(MuonConfig())),
    ("layout", "slices", 1), ("layout", "slice_lengths", None), ("layout.sharding", "offload", 0.0), ("run", "offload_path", None),
    ("layout", "expert_tensor", 1), ("run", "phases", []), ("optimizer", "cautious", False),
    ("optimizer", "average_from", None), ("optimizer.muon", "row_beta", 0.0),
    ("run.checkpoint", "at", None),
]  # fmt: skip
"""Keys that came after stages had ids, with the value under which all is as before: stages of versions without them keep their id."""
_NEWER = [
    ("run", "deterministic", False), ("run", "moments", "fp32"), ("run", "async_tensor", False), ("data", "task", None),
    ("data", "pack", False), ("data", "tokenizer", None), ("cluster", "setup_may_fail", []), ("cluster", "segment", None),
    *NEWER_THAN_STAGES,
]  # fmt: skip
"""Keys that came after trials had ids, likewise."""


def trial_id(config: Config) -> str:
    """12 hexadecimal digits; ``config`` must be resolved, so that a value given and the same value derived agree."""
    content = to_dict(run_of(config))
    del content["tracking"]
    defaults = {"command": None, "requests": None, "tune": to_dict(TuneConfig())}  # trials of versions without them keep their id
    for name, default in defaults.items():
        if content[name] == default:
            del content[name]
    place: dict[str, Any] = {name: value for name, value in to_dict(config.cluster).items() if name not in config.cluster.passing}
    place["hardware"] = config.cluster.hardware.name
    content["cluster"] = place
    leave_out(content, _NEWER)
    content["model"] = model_content(content["model"])
    read = digests(config)  # none for most trials, which keep the id that they had before
    return digest(content | ({"reads": read} if read else {}))


def leave_out(content: dict[str, Any], newer: Iterable[tuple[str, str, Any]]) -> None:
    """Removes the ``newer`` keys of sections, or of parts of sections, that are as usual."""
    for section, name, usual in newer:
        holds: dict[str, Any] = reduce(lambda part, key: part.get(key, {}), section.split("."), content)
        if holds.get(name, ...) == usual:
            del holds[name]


def model_content(model: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of a resolved model that tell it from others: those of the first version, and later ones that are not as usual."""
    first = {name: model[name] for name in FIRST_KEYS}
    usual = to_dict(resolve_model(ModelConfig(**first)))
    return {name: value for name, value in model.items() if name in first or value != usual[name]}


def digest(content: Any) -> str:
    """12 hexadecimal digits of plain data, independent of the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:12]


def digests(config: Config) -> dict[str, str]:
    """Returns digests of a run's input files by content; empty without any, or if they are not visible here."""
    data, files = config.data, dict[str, Path]()
    if config.trainer.foreign or not config.cluster.shares_files:
        return {}
    if data.kind == "instructions":
        files |= (
            {"tokenizer": Path(data.path, TOKENIZER)}
            | {name: Path(data.path, name) for name in NAMING}
            | ({} if data.source == STDLIB else {"examples": Path(data.source)})
        )
    if isinstance(config.tune.base, str) and (checkpoint := newest_checkpoint(Path(config.tune.base))) is not None:
        files["base"] = checkpoint / CHECKPOINT_MANIFEST
    return {name: found for name, path in files.items() if (found := _digest(path))}


def contents(config: Config) -> dict[str, str]:
    """Returns ``digests``, and those of files that the id holds by path alone, whose changes a command only reports."""
    if not config.cluster.shares_files:
        return {}
    command = run_of(config).command
    named = [part for word in command.words[1:] for part in (word, word.partition("=")[2])] if command else []
    found = digests(config) | {part: digest for part in named if (path := Path(part)).is_file() and (digest := _digest(path))}
    if config.data.kind == "corpus" and (command is None or any(config.data.path in word for word in named)):
        known = (read_json(Path(config.data.path, INDEX)) or {}).get("sha256")
        found |= {f"data.path={config.data.path}": known} if isinstance(known, str) else {}
    return found


def _digest(path: Path) -> str:
    try:
        known = path.stat()
        return _read(path.absolute(), known.st_ino, known.st_size, known.st_mtime_ns)
    except OSError:  # its reader reports the error
        return ""


@lru_cache(maxsize=64)
def _read(path: Path, *state: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
