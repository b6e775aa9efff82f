"""Weights as one GGUF file, the format of llama.cpp, and back. It differs from the Hugging Face layout in five ways:

- GPT-2's matrices are [out, in], BLOOM's and GPT-2's queries, keys and values are concatenated by kind,
- Llama's query and key rows are ordered for rotary pairs (2i, 2i + 1) instead of (i, i + d/2),
- norms that multiply by 1 + weight hold that sum,
- matrices of the same kind of all experts of a block are one tensor,
- matrices are F16 or Q8_0 (blocks of 32 with one scale), vectors and routers F32.

The package ``gguf`` (extra ``gguf``) provides the file format, the names of tensors, and all readable quantised types.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.convert.rules import rules
from trainer.convert.tokenizer import gguf_fields
from trainer.models.rope import angles
from trainer.shared.families.gguf import GgufFormat
from trainer.shared.families.registry import FAMILIES
from trainer.shared.records.gguf_header import FACTORS, LENGTHS, SCALED, Header, model_in, read_header
from trainer.shared.records.model_files import check_same
from trainer.shared.records.rope_factors import divisors, stretching
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import flatten
from trainer.shared.run.resolved import ResolvedModelConfig

DTYPES = {"float16": "F16", "q8_0": "Q8_0"}
EXPERT = re.compile(r"\.experts\.(\d+)\.")
BLOCK = 32
"""Number of values that share a scale in Q8_0."""


def library() -> Any:
    """Imports the package ``gguf``; ``ConfigError`` if it is not installed."""
    try:
        import gguf
    except ImportError:
        raise ConfigError("GGUF files need one more package: pip install 'gguf>=0.17'") from None
    return gguf


def write_file(
    path: Path,
    model: ResolvedModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: str,
    tokenizer: Path | None,
    weights: Sequence[Path],
) -> None:
    """Writes ``tensors``, under their Hugging Face names, that come from the folders ``weights``. ``OSError`` if that fails."""
    gguf = library()
    family, kind = FAMILIES[model.family], gguf.GGMLQuantizationType[DTYPES[dtype]]
    if family.gguf is None:
        raise ConfigError(
            f"model.family={model.family} cannot be exported as GGUF: no form of it is written here; export a Hugging Face folder"
        )
    architecture = family.gguf.architecture
    if model.activation == "squared_relu":
        raise ConfigError("model.activation=squared_relu cannot be exported: GGUF has no such GPT-2; export a Hugging Face folder")
    names = [name_there(name, model) for rule in rules(model) for name in rule.theirs]
    said, factors = header(model, family.gguf), factors_of(model)
    check_same(flatten(model), flatten(model_in(Header({"general.architecture": architecture, **said}, {*names}, factors), path)), family)
    writer = gguf.GGUFWriter(path, architecture, use_temp_file=False)
    try:
        for name, value in said.items():
            {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}[type(value)](name, value)
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{DTYPES[dtype]}"])
        for add, value in gguf_fields(tokenizer, model.vocab, weights) if tokenizer is not None else ():
            getattr(writer, add)(value)
        for name, each in factors.items():
            writer.add_tensor(name, np.array(each, dtype=np.float32))
        for there, values in stacked(tensors, model):
            form = gguf.GGMLQuantizationType.F32 if values.ndim == 1 or there.startswith("position_embd") or "gate_inp" in there else kind
            if form.name == "Q8_0" and values.shape[-1] % BLOCK:
                form = gguf.GGMLQuantizationType.F16
            writer.add_tensor(there, gguf.quantize(values, form), raw_dtype=form)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def stacked(tensors: Iterable[tuple[str, Tensor]], model: ResolvedModelConfig) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yields ``tensors`` by their names there; those of experts, of which one after the other comes, as one."""
    pending: dict[str, list[np.ndarray[Any, Any]]] = {}
    for name, tensor in tensors:
        there, values = name_there(name, model), arranged(name, tensor, model).float().numpy()
        if expert_of(name) is None:
            yield there, values
            continue
        pending.setdefault(there, []).append(values)
        if len(pending[there]) == model.experts.count:
            yield there, np.stack(pending.pop(there))


def expert_of(name: str) -> int | None:
    """Returns the number of the expert that a tensor of the Hugging Face layout belongs to, if to one alone."""
    found = EXPERT.search(name)
    return None if found is None else int(found[1])


def header(model: ResolvedModelConfig, form: GgufFormat) -> dict[str, Any]:
    """Returns the fields of a file that describe the model."""
    fields: dict[str, Any] = {theirs: getattr(model, ours) for ours, theirs in LENGTHS.items()}
    fields[f"attention.layer_norm{'_rms' if model.norm == 'rms' else ''}_epsilon"] = model.norm_eps
    fields["vocab_size"] = model.vocab
    if model.head_width * model.heads != model.hidden:
        fields |= {"attention.key_length": model.head_width, "attention.value_length": model.head_width}
    if model.positions == "rotary":
        turning = round(model.rope.share * model.head_width) if form.partial else model.head_width
        fields |= {"rope.dimension_count": turning, "rope.freq_base": float(model.rope_theta)}
    if scaling := SCALED.get(model.rope.kind):
        fields["rope.scaling.type"] = model.rope.kind
        fields |= {f"rope.scaling.{theirs}": getattr(model.rope, ours) for ours, theirs in scaling.items()}
    if model.rope.kind == "longrope":
        fields |= {"rope.scaling.original_context_length": model.rope.original, "rope.scaling.attn_factor": angles(model, 0).magnitude}
    values = flatten(model)
    fields |= {one.name: one.write(values[ours]) for ours, one in form.fields.items() if values[ours] is not None}
    fields |= {name: made(values) for name, made in form.stated.items()}
    fields = {name: value for name, value in fields.items() if value is not None}
    return {f"{form.architecture}.{name}": value for name, value in fields.items()}


def factors_of(model: ResolvedModelConfig) -> Mapping[str, Sequence[float]]:
    """Returns the tensors of divisors of the rotary frequencies, by name."""
    if model.rope.kind == "llama3":
        width = round(model.rope.share * model.head_width)
        found = divisors(model.rope, width, model.rope_theta)
        told = stretching(found, width, model.rope_theta)
        for name, value in (told or {"kind": None}).items():
            if value != (given := getattr(model.rope, name)):
                raise ConfigError(
                    f"model.rope.{name}={given} cannot be exported: the factors of frequencies that a GGUF file holds do not tell it; "
                    "export a Hugging Face folder"
                )
        return {"rope_freqs.weight": found}
    if model.rope.kind == "longrope":
        return {f"rope_factors_{which}.weight": getattr(model.rope, which) for which in ("short", "long")}
    return {}


def name_there(name: str, model: ResolvedModelConfig) -> str:
    """Returns GGUF's name of a tensor of the Hugging Face layout."""
    gguf = library()
    family = FAMILIES[model.family]
    assert family.gguf is not None
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.gguf.architecture.upper()], model.layers)
    name = EXPERT.sub(".experts.", name)
    for end, theirs in family.gguf.renamed.items():
        name = name.removesuffix(end) + theirs if name.endswith(end) else name
    known = (names.get_name(n, (".weight", ".bias")) for n in (name, name.removeprefix(family.hub.root)))
    return str(next(filter(None, known)))


def arranged(name: str, tensor: Tensor, model: ResolvedModelConfig, back: bool = False) -> Tensor:
    """Converts a tensor from the Hugging Face layout to GGUF's, or ``back``: another order, or the whole factor of a norm."""
    family = FAMILIES[model.family]
    assert family.gguf is not None
    if family.norm_offset and name.endswith("norm.weight"):
        return tensor.float() - 1 if back else tensor.float() + 1
    match next((way for end, way in family.gguf.arranged.items() if name.endswith(end)), "same"):
        case "transposed":
            return tensor.t().contiguous()
        case "by kind":
            outer = (3, model.heads) if back else (model.heads, 3)
            return tensor.reshape(*outer, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)
        case "pairs of queries" | "pairs of keys" as way:
            heads, half = (model.heads if way == "pairs of queries" else model.kv_heads), model.head_width // 2
            pairs = (half, 2) if back else (2, half)
            return tensor.reshape(heads, *pairs, -1).transpose(1, 2).reshape(tensor.shape)
    return tensor


class File:
    """A GGUF file of a ``model``: its ``fields`` and its tensors by their Hugging Face names. ``ConfigError`` if it cannot be read."""

    def __init__(self, source: Path, model: ResolvedModelConfig):
        self.source, self.gguf, self.model, self.fields = source, library(), model, read_header(source).fields
        try:
            self.tensors = {tensor.name: tensor for tensor in self.gguf.GGUFReader(source).tensors}
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise ConfigError(f"{source} cannot be read as GGUF: {error}; give a whole .gguf file") from None
        self.used: set[str] = set()

    def _values(self, name: str, expert: int | None) -> Tensor:
        """Reads a tensor, or of one of all experts that of ``expert``."""
        stored = self.tensors[name]
        data, shape = stored.data, stored.shape.tolist()[::-1]
        if expert is not None:
            data, shape = data[expert], shape[1:]
        return torch.from_numpy(np.array(self.gguf.dequantize(data, stored.tensor_type), dtype=np.float32).reshape(shape))

    def take(self, name: str) -> Tensor:
        """Reads the tensor of that name as fp32, in the order of the Hugging Face layout."""
        theirs = name_there(name, self.model)
        if theirs not in self.tensors:
            raise ConfigError(f"{self.source} has no tensor {theirs}; it is incomplete or of another architecture")
        self.used.add(theirs)
        return arranged(name, self._values(theirs, expert_of(name)), self.model, back=True)

    def check_all_used(self) -> None:
        """Raises ``ConfigError`` for weights that would be left out."""
        left = sorted(set(self.tensors) - self.used - FACTORS.keys())
        if left:
            raise ConfigError(f"{self.source}: no place for {left[0]} (and {len(left) - 1} more); this variant is not trained here")
