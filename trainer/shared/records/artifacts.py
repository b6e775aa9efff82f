"""An artifact: the output of a stage and the input of others. A folder with a manifest, ``artifact.json``, which is written last and in one
step.

A folder without a whole manifest is not an artifact: its stage was killed, or is still running. The same holds if a file is missing, or its
size differs from that in the manifest. The digest names the content: it is made from the SHA-256 of every file.

Some folders have a manifest of their own that suffices: a corpus of ``trireme prepare`` its ``index.json``, a checkpoint its
``manifest.json``. ``find_artifact`` takes these too, and weights from elsewhere: a Hugging Face folder, a GGUF file. It does not read the
content of those, which may be hundreds of gigabytes: names, sizes and times of change of the files stand for it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from trainer.shared.corpora.index import ARTIFACT, FILES, INDEX
from trainer.shared.run.derived import recorded_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import read_json, write_json
from trainer.shared.run.schema import ModelConfig

FORMAT = 1
MANIFEST = ARTIFACT
CHECKPOINT_MANIFEST, MODEL_CONFIG = "manifest.json", "config.json"
GGUF, GGUF_FILE = ".gguf", "model.gguf"
"""The suffix of such a file's name, and its name in an artifact."""
METRICS_FILE = "metrics.json"
"""The figures of an evaluation."""
FETCHED = "tasks.json"
"""File of a folder of fetched tasks: their names."""
CHECKPOINTS = "checkpoints"
CHECKPOINT_NAME = re.compile(r"step-(?P<step>\d+)-start-(?P<start>\d+)")
"""Folder of an artifact's checkpoints, as of a trial's."""
BLOCK = 1 << 20
NOT_SHAPE = ("dropout", "attention", "init_std", "zero_init", "transfer")
"""Fields of a model in which a run may differ from the checkpoint that it reads."""
OTHER_BASE = "give the model of the base, or another tune.base"
"""Remedy where the base has another model."""


class ArtifactKind(str, Enum):
    """The kind of an artifact."""

    CORPUS = "corpus"
    CHECKPOINT = "checkpoint"
    HUGGINGFACE = "huggingface"
    GGUF = "gguf"
    METRICS = "metrics"
    TEXT = "text"
    TASKS = "tasks"
    RETURNED = "returned"


@dataclass(frozen=True)
class Artifact:
    """The content of a manifest. ``inputs`` are the identities of the artifacts it was made from, ``files`` the bytes of each file by its
    path inside."""

    kind: ArtifactKind
    digest: str
    made_by: str
    inputs: dict[str, str] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)


def write_artifact(folder: Path, kind: ArtifactKind, made_by: str, inputs: Mapping[str, str] | None = None) -> Artifact:
    """Declares ``folder`` complete, after the last write to it. Reads every file once. Raises ``OSError`` if it cannot be read or
    written."""
    names = _files(folder)
    sizes = {name: (folder / name).stat().st_size for name in names}
    made = Artifact(kind, content_digest(folder, names), made_by, dict(inputs or {}), sizes)
    data = {"format": FORMAT, "kind": kind.value, "digest": made.digest, "made_by": made_by, "inputs": made.inputs, "files": sizes}
    write_json(folder / MANIFEST, data, durable=True)
    return made


def read_artifact(folder: Path) -> Artifact | None:
    """Reads the artifact in ``folder``; returns None if its manifest is missing, torn or of another version, or files are missing or
    cut."""
    data = read_json(folder / MANIFEST)
    made = None if data is None else _parse(data)
    if made is None or any(_size(folder / name) != size for name, size in made.files.items()):
        return None
    return made


def find_artifact(folder: Path) -> Artifact | None:
    """Returns ``read_artifact``, or an artifact recognised by the manifest of its own kind, whose digest it then has, or by its weights."""
    if folder.suffix == GGUF and folder.is_file():
        return _recognised(ArtifactKind.GGUF, folder)
    if (made := read_artifact(folder)) is not None:
        return made
    if (folder / INDEX).is_file() and all((folder / name).is_file() for name in FILES):
        return _recognised(ArtifactKind.CORPUS, manifest=folder / INDEX)
    if (checkpoint := newest_checkpoint(folder)) is not None:
        return _recognised(ArtifactKind.CHECKPOINT, manifest=checkpoint / CHECKPOINT_MANIFEST)
    if (folder / FETCHED).is_file():
        return _recognised(ArtifactKind.TASKS, manifest=folder / FETCHED)
    weights = sorted(folder.glob("*.safetensors"))
    if (folder / MODEL_CONFIG).is_file() and weights:
        return _recognised(ArtifactKind.HUGGINGFACE, *weights, manifest=folder / MODEL_CONFIG)
    return None


def checkpoint_order(path: Path) -> tuple[int, int] | None:
    """Returns the key by which the newest of a run's checkpoints is the largest: its start, then its step. A start from scratch in a used
    folder is newer than the files there, though of fewer steps. None for another name."""
    named = CHECKPOINT_NAME.fullmatch(path.name)
    return named and (int(named["start"]), int(named["step"]))


def newest_checkpoint(folder: Path) -> Path | None:
    """Finds the newest checkpoint in its own folder, that of a run's checkpoints, the run's (a trial's), or an artifact: of the last start
    that saved one, that of the most steps."""
    found = [path for place in (folder, folder / CHECKPOINTS) for path in sorted(place.glob(f"step-*/{CHECKPOINT_MANIFEST}"))]
    if not found and read_json(folder / CHECKPOINT_MANIFEST) is not None:
        return folder
    return max((path.parent for path in found), key=lambda path: (checkpoint_order(path) or (-1, -1), path.name), default=None)


def checkpoint_facts(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the newest checkpoint in ``folder`` and its manifest. Raises ``ConfigError`` when there is none, or it cannot be read."""
    checkpoint = newest_checkpoint(folder)
    manifest = None if checkpoint is None else read_json(checkpoint / CHECKPOINT_MANIFEST)
    if checkpoint is None or manifest is None or not isinstance(manifest.get("model"), dict):
        raise ConfigError(
            f"{folder} is not a checkpoint and holds none that can be read; give a folder that 'run.checkpoint.every' has filled"
        )
    return checkpoint, manifest


def check_model_of(checkpoint: Path, saved: Mapping[str, Any], model: ModelConfig, remedy: str) -> None:
    """Raises ``ConfigError`` with ``remedy`` if a resolved ``model`` does not have the weights of the one in a checkpoint's manifest, or
    has longer rows than these were made for; shorter ones take the first positions."""
    there = asdict(recorded_model(saved))
    for name, value in asdict(model).items():
        if name == "seq" and value > saved["seq"]:
            raise ConfigError(
                f"model.seq={value} is longer than the {saved['seq']} positions that checkpoint {checkpoint} was made for; "
                f"use {saved['seq']} or less, or {remedy}"
            )
        if name not in (*NOT_SHAPE, "seq") and there[name] != value:
            raise ConfigError(f"checkpoint {checkpoint} is of another model: model.{name}={there[name]} there, {value} here; {remedy}")


def content_digest(folder: Path, names: list[str]) -> str:
    """Returns the SHA-256 over names and contents of files."""
    digest = hashlib.sha256()
    for name in names:
        content = hashlib.sha256()
        with (folder / name).open("rb") as file:
            while block := file.read(BLOCK):
                content.update(block)
        digest.update(f"{name}\0{content.hexdigest()}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _files(folder: Path) -> list[str]:
    """Lists the paths of all files, relative to ``folder``, sorted, without the manifest and hidden files (locks, work in progress)."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(place, name).relative_to(folder).as_posix() for name in names if not name.startswith(".")]
    return sorted(name for name in found if name != MANIFEST)


def _parse(data: Mapping[str, Any]) -> Artifact | None:
    kinds = {kind.value for kind in ArtifactKind}
    words, tables = (data.get("digest"), data.get("made_by")), (data.get("inputs"), data.get("files"))
    if data.get("format") != FORMAT or data.get("kind") not in kinds:
        return None
    if not all(isinstance(word, str) for word in words) or not all(isinstance(table, dict) for table in tables):
        return None
    return Artifact(ArtifactKind(data["kind"]), data["digest"], data["made_by"], data["inputs"], data["files"])


def _recognised(kind: ArtifactKind, *files: Path, manifest: Path | None = None) -> Artifact:
    """Returns an artifact identified by the content of ``manifest`` and the state of ``files``."""
    digest = hashlib.sha256(manifest.read_bytes() if manifest is not None else b"")
    for path in files:
        state = path.stat()
        digest.update(f"\0{path.name} {state.st_size} {state.st_mtime_ns}".encode("utf-8", "surrogateescape"))
    return Artifact(kind, digest.hexdigest(), made_by="")


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
