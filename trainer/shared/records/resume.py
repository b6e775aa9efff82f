"""Checks the checkpoint that a run resumes from before anything is loaded, and in the launcher before anything is started."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainer.shared.records.artifacts import check_model_of, checkpoint_order, newest_checkpoint
from trainer.shared.records.manifest import MANIFEST, CheckpointError, FoundCheckpoint, read_manifest
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import to_dict
from trainer.shared.run.schema import ModelConfig, TrainConfig, TuneConfig

T = TypeVar("T")

REMEDY = "give another run.checkpoint.dir, or start from scratch with run.checkpoint.resume=false"
FREE = ("base", "dropout")
"""Fields of a tuning that may change when it is resumed: where its base lies, and dropout."""


def newest(folder: Path) -> FoundCheckpoint:
    """Returns the newest checkpoint in ``folder``. Raises ``ConfigError`` when there is none."""
    path = newest_checkpoint(folder)
    if path is None:
        raise ConfigError(f"{folder} is not a checkpoint and holds none; give a folder that 'run.checkpoint.every' has filled")
    return FoundCheckpoint(0, 0, path)


def base_identity(tune: TuneConfig, seed: int) -> str:
    """Returns the identity of a base: the digest of its manifest, or the seed of initial weights. Raises ``ConfigError`` if it does not
    exist."""
    return f"seed {seed}" if tune.base is None else digest_of(newest(Path(tune.base)))


def digest_of(found: FoundCheckpoint) -> str:
    """Returns the identity of a checkpoint wherever it lies: the digest of its manifest, which holds the checksums of its weights."""
    return hashlib.sha256((found.path / MANIFEST).read_bytes()).hexdigest()


def section(tune: TuneConfig, identity: str) -> dict[str, Any] | None:
    """Returns the tuning section of a checkpoint's manifest; None where the checkpoint holds all weights."""
    return None if tune.method == "full" else to_dict(tune) | {"identity": identity}


def check_section(found: FoundCheckpoint, saved: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> None:
    """Raises ``ConfigError`` if a checkpoint does not continue this tuning: another method, or another base."""
    saved, own = saved or {"method": "full"}, own or {"method": "full"}
    if saved.get("identity") != own.get("identity") and saved["method"] == own["method"]:
        raise ConfigError(
            f"checkpoint {found.path} was tuned from another base ({saved.get('base') or saved.get('identity')}); "
            "set tune.base to that one, or give another run.checkpoint.dir"
        )
    for name, value in own.items():
        if name not in FREE and saved.get(name) != value:
            raise ConfigError(
                f"checkpoint {found.path} is of another tuning: tune.{name}={saved.get(name)} there, {value} here; "
                "restore that, or give another run.checkpoint.dir"
            )


@dataclass(frozen=True)
class DataOrder:
    """Determines which tokens a sample holds (``seed``, ``corpus`` and the length ``seq``), and how many samples make a step."""

    seed: int
    corpus: str | None  # its digest, or ``synthetic``; None where it is not known yet
    global_batch: int
    seq: int

    def differs(self, saved: Mapping[str, Any] | None) -> list[str]:
        """Lists the differences from a checkpoint's data; an imported model has no data (None)."""
        own = {name: value for name in ("seed", "corpus", "seq") if (value := getattr(self, name)) is not None}
        return [] if saved is None else [name for name, value in own.items() if saved.get(name, value) != value]


def found_in(root: Path) -> list[FoundCheckpoint]:
    """Returns the committed checkpoints of a run's folder, newest first."""
    if not root.is_dir():
        return []
    named = [(order, path) for path in root.iterdir() if (order := checkpoint_order(path))]
    return sorted((FoundCheckpoint(*order, path) for order, path in named), reverse=True)


def positions(config: TrainConfig, root: Path | None) -> int:
    """Returns how many positions the weights of a run are made for, of which its rows take the first: those of the checkpoint in ``root``
    that it resumes, or else of its base."""
    base = None if config.tune.base is None else newest_checkpoint(Path(config.tune.base))
    begins = [found.path for found in found_in(root)] if root is not None and config.run.checkpoint.resume else []
    for path in (*begins, base):
        with contextlib.suppress(CheckpointError):
            return max(config.model.seq, 0 if path is None else read_manifest(FoundCheckpoint(0, 0, path))["model"]["seq"])
    return config.model.seq


def continued_from(found: list[FoundCheckpoint], root: Path, at: int | None) -> list[FoundCheckpoint]:
    """Returns the checkpoints that a run may continue, the best first: of step ``at`` alone, if it is given. Raises ``ConfigError`` if
    there is none of that step."""
    if at is None:
        return found
    if not (wanted := [one for one in found if one.step == at]):
        there = ", ".join(str(step) for step in sorted({one.step for one in found})) or "none at all"
        raise ConfigError(f"run.checkpoint.at={at}: {root} has no checkpoint after {at} steps, but {there}; give one of these")
    return wanted


def check_folder(root: Path) -> None:
    """Raises ``ConfigError`` if a run that is given ``root`` would not see the checkpoints that other verbs find by that name."""
    newest = None if found_in(root) else newest_checkpoint(root)
    if newest is not None:
        what = "is one checkpoint" if newest == root else "holds the folder of a run's checkpoints"
        raise ConfigError(
            f"run.checkpoint.dir={root} {what}; a run resumes from the newest in their folder and saves there: "
            f"give run.checkpoint.dir={os.path.dirname(os.path.abspath(newest))}"
        )


def check_continues(
    found: FoundCheckpoint,
    manifest: Mapping[str, Any],
    model: ModelConfig,
    tune: Mapping[str, Any] | None,
    data: DataOrder,
    new_data: bool,
    optimizer: str,
) -> None:
    """Raises ``ConfigError`` unless a run of a resolved ``model``, tuned as ``tune`` says, continues a checkpoint. Other data is refused
    unless ``new_data`` allows it, and moments of another kind of ``optimizer``."""
    check_model_of(found.path, manifest["model"], model, REMEDY)
    check_section(found, manifest.get("tune"), tune)
    kind = manifest.get("optimizer", "adamw")
    if manifest["data"] is not None and kind != optimizer:
        raise ConfigError(
            f"checkpoint {found.path} has the moments of optimizer.kind={kind}, and it is {optimizer} now; restore that, or {REMEDY}"
        )
    saved = manifest["data"] and {"seq": manifest["model"]["seq"]} | manifest["data"]
    if (other := data.differs(saved)) and not new_data:
        key = {"seed": "run.seed", "corpus": "the checksum of data.path", "seq": "model.seq"}[other[0]]
        there, here = (str(value)[:12] for value in (saved[other[0]], getattr(data, other[0])))
        raise ConfigError(
            f"checkpoint {found.path} is of other data: {key} was {there} and is {here} now; "
            "restore that, set run.checkpoint.new_data=true to continue with the first sample of this data, "
            "or start from scratch with run.checkpoint.resume=false"
        )


def first_whole(
    candidates: Iterable[FoundCheckpoint], load: Callable[[FoundCheckpoint], T], skip: Callable[[CheckpointError], None]
) -> T | None:
    """Returns the result of ``load`` for the first undamaged candidate; ``skip`` is told of those before it. Returns None if there are no
    ``candidates``, raises ``ConfigError`` if all are damaged."""
    damage = ""
    for found in candidates:
        try:
            return load(found)
        except CheckpointError as error:
            damage = damage or str(error)
            skip(error)
    if damage:
        raise ConfigError(f"{damage}, and no older one is complete; restore it, or start from scratch with run.checkpoint.resume=false")
    return None


def check_resume(config: TrainConfig, corpus: str | None) -> None:
    """Raises ``ConfigError`` for a ``run.checkpoint.dir`` that the ranks of this run would refuse to resume, with their message.

    ``corpus`` is the name of its data, None if not known yet. Weights are not read, only manifests and sizes.
    """
    settings, run = config.run.checkpoint, config.run
    if settings.dir is None:
        return
    check_folder(Path(settings.dir))
    if not settings.resume or not (candidates := continued_from(found_in(Path(settings.dir)), Path(settings.dir), settings.at)):
        return
    tune = None if config.tune.method == "full" else section(config.tune, base_identity(config.tune, run.seed))
    model, data = resolve_model(config.model), DataOrder(run.seed, corpus, run.global_batch, config.model.seq)

    def check(found: FoundCheckpoint) -> None:
        check_continues(found, read_manifest(found), model, tune, data, settings.new_data, config.optimizer.kind)

    first_whole(candidates, check, lambda damage: None)
