"""Export of a checkpoint's weights to a Hugging Face folder, and import of such a folder as the checkpoint of step 0.

Tensors are converted one at a time, so neither direction holds more than about one file in memory.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.checkpoint.folder import Folder
from trainer.checkpoint.pieces import whole
from trainer.checkpoint.shards import PieceSnapshot, Reader, write_rank
from trainer.checkpoint.tuned import Merged, open_reader
from trainer.convert import distributed, gguf
from trainer.convert.folding import FoldedReader, folded
from trainer.convert.rules import rules
from trainer.convert.tokenizer import TEMPLATE, chat_template, find_tokenizer, from_gguf, generation_of, named_in_gguf, write_files
from trainer.models.encoder_decoder import network
from trainer.shared.corpora.index import TOKENIZER
from trainer.shared.families.registry import FAMILIES
from trainer.shared.records.artifacts import GGUF, newest_checkpoint
from trainer.shared.records.manifest import CheckpointError, FoundCheckpoint, read_manifest
from trainer.shared.records.model_files import read_model, to_config, to_import
from trainer.shared.records.named_tokens import DECODER_START, GENERATION, NAMED, decoder_start, named_tokens
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import write_json
from trainer.shared.run.read import from_dict
from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import ModelConfig

FILE_BYTES = 5 * 10**9
"""The size in bytes at which a new safetensors file is started."""
INDEX = "model.safetensors.index.json"


def export_weights(
    checkpoint: Path, target: Path, dtype: torch.dtype = torch.float32, tokenizer: Path | None = None
) -> ResolvedModelConfig:
    """Writes the folder ``target``: config.json, the weights as safetensors in ``dtype``, generation settings, and the tokenizer's files.

    ``checkpoint`` is one checkpoint, or a folder of them (the newest is used). The tokenizer is the one found there unless another is
    given. ``ConfigError``, with nothing left behind, if it cannot be read, its model has no Hugging Face layout, or ``target`` exists.
    """
    with _made(checkpoint, target) as (work, model, reader):
        work.mkdir()
        tokenizer = tokenizer or find_tokenizer(checkpoint)
        write_files(work, tokenizer, model, _places(checkpoint, reader.reader))
        ends = {name: token for name, token in json.loads((work / GENERATION).read_text()).items() if name in (*NAMED, DECODER_START)}
        write_json(work / "config.json", to_config(model) | ends | {"torch_dtype": str(dtype).removeprefix("torch.")})
        _write_tensors(work, _exported(reader, model, dtype))
    return model


def export_gguf(checkpoint: Path, target: Path, dtype: str = "float16", tokenizer: Path | None = None) -> ResolvedModelConfig:
    """Writes the GGUF file ``target``, with matrices as ``dtype`` (float16 or q8_0); arguments and errors as for ``export_weights``."""
    with _made(checkpoint, target) as (work, model, reader):
        tokenizer, places = tokenizer or find_tokenizer(checkpoint), _places(checkpoint, reader.reader)
        gguf.write_file(work, model, _exported(reader, model, torch.float32), dtype, tokenizer, places)
    return model


def export(checkpoint: Path, target: Path, dtype: str, tokenizer: Path | None = None) -> None:
    """Calls ``export_gguf`` or ``export_weights``, by the suffix of ``target``."""
    if target.suffix == GGUF:
        export_gguf(checkpoint, target, dtype, tokenizer)
    else:
        export_weights(checkpoint, target, getattr(torch, dtype), tokenizer)
    print(f"exported {checkpoint} to {target}")


def _places(checkpoint: Path, reader: Reader | Merged) -> list[Path]:
    """Returns the folders next to the weights, and next to those that they were tuned from."""
    folders = [checkpoint, *([Path(reader.tune.base)] if isinstance(reader, Merged) and reader.tune.base else [])]
    return [place for folder in folders for place in (folder, folder.parent)]


@contextmanager
def _made(checkpoint: Path, target: Path) -> Iterator[tuple[Path, ResolvedModelConfig, FoldedReader]]:
    """Yields a temporary path that becomes ``target`` on success (see ``placed``), the model as others know it, and the reader of the
    checkpoint."""
    found = _find(checkpoint)
    try:
        with placed(target) as work:
            manifest = read_manifest(found)
            model, reader = resolve_model(from_dict(ModelConfig, manifest["model"], "model.")), open_reader(found, manifest)
            yield work, folded(model), FoldedReader(reader, model)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot export to {target}: {reason}; make room or give permission there, or name another place") from None


@contextmanager
def placed(target: Path) -> Iterator[Path]:
    """Yields a hidden path next to ``target`` for a file or folder: renamed to ``target`` on success, removed otherwise. ``ConfigError`` if
    ``target`` exists, unless it is an empty folder."""
    if target.exists() and not (target.name and _empty(target)):
        raise ConfigError(f"{target} exists already; give another name")
    work = target.with_name(f".{target.name}.partial")
    try:
        _remove(work)
        work.parent.mkdir(parents=True, exist_ok=True)
        yield work
        work.rename(target)
    finally:
        _remove(work)


def _empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def import_weights(source: Path, target: Path) -> ResolvedModelConfig:
    """Writes the model in ``source``, a Hugging Face folder or a GGUF file (or a folder with ``model.gguf``), as the checkpoint of step 0
    in the folder ``target``.

    A run with ``run.checkpoint.dir=target`` starts from it, with moments of zero. A readable tokenizer is copied as well. ``ConfigError``,
    with nothing left behind, if the source cannot be read, lacks tensors or has some without a rule, or if ``target`` exists.
    """
    try:
        with placed(target) as work, ExitStack() as stack:
            folder = Folder(work, run="import", attempt=0, token=uuid.uuid4().hex[:12])
            model, tensors = _open(source, stack)
            folder.enter()
            write_rank(folder.workspace(0), 0, _imported(tensors, model))
            tensors.check_all_used()
            _take_tokenizer(tensors, work, model)
            folder.commit(0, 1, {"model": asdict(model), "data": None, "extra": {"samples": 0, "updates": 0}}, timeout_s=60)
    except (OSError, CheckpointError) as error:
        raise ConfigError(f"cannot import to {target}: {error}; make room or give permission there, or name another folder") from None
    return model


def _open(source: Path, stack: ExitStack) -> tuple[ResolvedModelConfig, Stored]:
    """Opens the model in a folder or a GGUF file, and its tensors."""
    place, model = to_import(source)
    if place.is_file():
        return model, gguf.File(place, model)
    if (place / distributed.METADATA).is_file():
        return model, distributed.Checkpoint(place, model)
    return model, _Tensors(place, model, stack)


def _take_tokenizer(tensors: Stored, target: Path, model: ResolvedModelConfig) -> None:
    """Writes tokenizer and generation settings next to the checkpoint."""
    if isinstance(tensors, gguf.File):
        known, named = from_gguf(tensors.fields), named_in_gguf(tensors.fields)
        if known is not None:
            write_json(target / TOKENIZER, known)
    else:
        found, named = find_tokenizer(tensors.source), named_tokens([tensors.source])
        if found is not None:
            shutil.copyfile(found, target / TOKENIZER)
        if (template := chat_template(tensors.source)) is not None:
            (target / TEMPLATE).write_text(template, encoding="utf-8")
        if named:
            named = generation_of([tensors.source]) | named
        if model.encoder_layers and (begin := decoder_start([tensors.source])) is not None:
            named[DECODER_START] = begin
    if named:
        write_json(target / GENERATION, named)


def read_weights(source: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields name and tensor of each of our parameters from the Hugging Face folder ``source``, reading lazily."""
    model = read_model(source)
    with ExitStack() as stack:
        tensors = _Tensors(source, model, stack)
        yield from _joined(tensors, model)
        tensors.check_all_used()


def shapes(model: ResolvedModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter of a model by global name; a tied weight occurs once."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in network(model).named_parameters()}


def _find(path: Path) -> FoundCheckpoint:
    newest = newest_checkpoint(path)
    if newest is None:
        raise ConfigError(f"{path} is not a checkpoint and holds none; give a folder that 'run.checkpoint.every' has filled")
    return FoundCheckpoint(0, 0, newest)


def _exported(reader: FoldedReader, model: ResolvedModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields their names and tensors, one of our parameters at a time."""
    for rule in rules(model):
        piece = whole(rule.ours, reader.shapes.get(rule.ours, ()))
        weight = torch.empty(piece.numel, dtype=dtype)
        reader.read(piece, {"weight": weight})
        yield from ((name, part.contiguous()) for name, part in zip(rule.theirs, rule.split(weight.view(piece.shape))))


def _write_tensors(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Writes one file, or several of about ``FILE_BYTES`` with an index from tensors to files."""
    files: list[tuple[Path, list[str]]] = []
    pending: dict[str, Tensor] = {}

    def close() -> None:
        path = folder / f"part-{len(files)}"
        save_tensors(pending, path)
        files.append((path, list(pending)))
        pending.clear()

    total = 0
    for name, tensor in tensors:
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > FILE_BYTES:
            close()
        pending[name] = tensor
        total += tensor.nbytes
    close()
    if len(files) == 1:
        files[0][0].rename(folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for i, (path, names) in enumerate(files, start=1):
        final = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        path.rename(folder / final)
        places |= dict.fromkeys(names, final)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes a safetensors file with the default permissions; the library itself makes files that only their owner can read."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


def _imported(tensors: Stored, model: ResolvedModelConfig) -> Iterator[PieceSnapshot]:
    for name, weight in _joined(tensors, model):
        yield PieceSnapshot(whole(name, weight.shape), {"weight": weight.flatten()})


def _joined(tensors: Stored, model: ResolvedModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yields name and tensor of each of our parameters; ``ConfigError`` if the tensors of the source do not match its shape."""
    expected = shapes(model)
    for rule in rules(model):
        shape = expected[rule.ours]
        parts = [tensors.take(name).to(torch.float32) for name in rule.theirs]
        if sum(part.numel() for part in parts) != whole(rule.ours, shape).numel:
            got = ", ".join(f"{name} {list(part.shape)}" for name, part in zip(rule.theirs, parts))
            raise ConfigError(
                f"{tensors.source}: {got} do not fill {rule.ours} {list(shape)}; the model that it describes has other weights"
            )
        yield rule.ours, rule.join(parts, shape).contiguous()


def weight_files(source: Path) -> list[Path]:
    """Returns the files that hold a folder's weights: those named by its index, ``model.safetensors``, or else all. An earlier save may
    have left others. ``ConfigError`` if there are none."""
    single, index, named = source / "model.safetensors", source / INDEX, set[Path]()
    if index.exists():
        try:
            named = {source / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} cannot be read: {error}; give the index that was saved with the weights") from None
    if single.exists() and named - {single}:
        raise ConfigError(f"{source} has both {single.name} and {INDEX}; remove the one of an earlier save")
    if named or single.exists():
        return sorted(named or {single})
    paths = sorted(source.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"{source} has no .safetensors file; convert its weights to safetensors first")
    return paths


class Stored(Protocol):
    """Tensors under their Hugging Face names, read lazily."""

    source: Path

    def take(self, name: str) -> Tensor:
        """Reads the tensor of that name; ``ConfigError`` if there is none."""

    def check_all_used(self) -> None:
        """Raises ``ConfigError`` for weights that would be left out."""


class _Tensors:
    """The tensors of a folder by name, read lazily."""

    def __init__(self, source: Path, model: ResolvedModelConfig, stack: ExitStack) -> None:
        self.source, self.hub = source, FAMILIES[model.family].hub
        self.files: dict[str, Any] = {}
        for path in weight_files(source):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} cannot be read: {error}") from None
            if twice := sorted(self.files.keys() & file.keys()):
                raise ConfigError(f"{source} has {twice[0]} in several files, {path.name} among them; remove those of another save")
            self.files |= dict.fromkeys(file.keys(), file)
        self.used: set[str] = set()

    def take(self, name: str) -> Tensor:
        """Reads the tensor of that name; the published GPT-2 and BLOOM omit the root of names."""
        known = next((n for n in (name, name.removeprefix(self.hub.root)) if n in self.files), None)
        if known is None:
            raise ConfigError(f"{self.source} has no tensor {name}; the files are incomplete or of another architecture")
        self.used.add(known)
        return self.files[known].get_tensor(known)

    def check_all_used(self) -> None:
        """Raises ``ConfigError`` for weights that would be left out: the imported model would not be the same."""
        left = sorted(n for n in self.files if n not in self.used and not n.endswith(self.hub.computed) and n != self.hub.output)
        if left:
            raise ConfigError(f"{self.source}: no place for {left[0]} (and {len(left) - 1} more); this variant is not trained here")
