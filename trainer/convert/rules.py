"""Names and shapes of our parameters in the Hugging Face layout of a family, by its record.

Shapes: g key/value heads, q query heads per key/value head, d head size, h hidden, f inner width of the MLP. Our fused matrix of
queries, keys and values is [g, q + 2, d, h]: for each of the g heads its queries, one key, one value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.shared.families.block import branches, head_norms
from trainer.shared.families.family import MATRICES
from trainer.shared.families.registry import FAMILIES
from trainer.shared.records.model_files import check_named
from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import NORM_VECTORS

FORMS: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "same": lambda w: [w],
    "by kind": lambda w: [w[:, :-2], w[:, -2], w[:, -1]],  # all queries, then all keys, then all values
    "stacked": lambda w: w.unbind(0),  # [2, f, h]: gate and up
    "keys and values": lambda w: w.unbind(1),  # [g, 2, d, h]: all keys, then all values
    "matrices": lambda w: w.flatten(0, -3).unbind(0),  # [E, 2, f, h] or [E, h, f]: of each expert, gate and up, or down
}
"""Views of one of our tensors, each in the order of one of theirs, or of a part of it if theirs is a single tensor; keyed as in
``HubFormat.forms``."""


@dataclass(frozen=True)
class Rule:
    """One of our parameters and the Hugging Face tensors that hold it: matrices with one row per output, and vectors."""

    ours: str
    theirs: tuple[str, ...]
    form: str = "same"
    inputs_first: bool = False  # their matrices are [in, out]

    @property
    def vector(self) -> bool:
        """Tells whether their tensors are vectors, whatever dimensions ours has: biases and norms."""
        module, _, key = self.ours.rpartition(".")
        return key == "bias" or module.endswith("norm")

    def split(self, w: Tensor) -> list[Tensor]:
        """Converts our tensor to theirs."""
        views = FORMS[self.form](w)
        if self.vector:
            parts = [view.flatten() for view in views]
        else:
            parts = [view.flatten(0, -2) if view.dim() > 2 else view for view in views]
        if len(parts) > len(self.theirs):
            parts = [torch.cat(parts)]
        return [part.t() for part in parts] if self.inputs_first else parts

    def join(self, parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """Converts their tensors to ours, of this shape."""
        w = parts[0].new_empty(shape)
        views = FORMS[self.form](w)
        parts = [part.t() if self.inputs_first else part for part in parts]
        if len(views) > len(parts):
            rows = [view.numel() if self.vector else view.numel() // view.shape[-1] for view in views]
            parts = parts[0].reshape(sum(rows), -1).split(rows)
        for view, part in zip(views, parts):
            view.copy_(part.reshape(view.shape))
        return w


def rules(model: ResolvedModelConfig) -> Iterator[Rule]:
    """Yields the rule of every parameter of ``model``: the ends of the network first, then its blocks in order."""
    check_named(model.family)
    family = FAMILIES[model.family]
    hub = family.hub
    yield from _rules(model, hub.ends, "", hub.root)
    if not model.tied:
        yield Rule("head.output.weight", (hub.output,))
    for i in range(model.layers):
        there = _place(model, i)
        yield from _rules(model, _modules(model, i), f"blocks.{i}.", there)
        if model.mixes(i) and model.experts.correction is not None and hub.correction:
            yield Rule(f"blocks.{i}.mlp.router.correction", (f"{there}{hub.correction}",))


def _decodes(model: ResolvedModelConfig, block: int) -> bool:
    """Tells whether a block stands behind those of an encoder."""
    return 0 < model.encoder_layers <= block


def _place(model: ResolvedModelConfig, block: int) -> str:
    """Returns what precedes the names of a block there, which count the blocks of each stack."""
    hub = FAMILIES[model.family].hub
    if _decodes(model, block):
        return f"{hub.root}{hub.decoder_blocks}.{block - model.encoder_layers}."
    return f"{hub.root}{hub.blocks}.{block}."


def _modules(model: ResolvedModelConfig, block: int) -> Mapping[str, str]:
    """Returns names of a block's modules, ours and theirs."""
    hub = FAMILIES[model.family].hub
    named = hub.decoder_block if _decodes(model, block) else hub.block
    if hub.ungated is not None and not model.gated:
        named = {**named, "mlp.up": f"{named['mlp.up'].split()[0].rpartition('.')[0]}.{hub.ungated}"}
    if not model.mixes(block):
        return named
    return {**{ours: theirs for ours, theirs in named.items() if not ours.startswith("mlp.")}, **hub.mixture}


def _rules(model: ResolvedModelConfig, modules: Mapping[str, str], here: str, there: str) -> Iterator[Rule]:
    """Yields rules for the parameters of those ``modules`` that the model has, with the prefixes ``here`` and ``there``."""
    hub = FAMILIES[model.family].hub
    missing = absent(model)
    for ours, theirs in modules.items():
        turned = hub.inputs_first and ours.rpartition(".")[2] in MATRICES
        for key in parameters_of(model, ours) if ours not in missing else ():
            experts = range(model.experts.count if "{}" in theirs else 1)
            names = tuple(f"{there}{name.format(expert)}.{key}" for expert in experts for name in theirs.split())
            form = "matrices" if "{}" in theirs else hub.forms.get(ours, "same")
            form = "same" if form == "stacked" and not model.gated else form
            yield Rule(f"{here}{ours}.{key}", names, form, turned)


def absent(model: ResolvedModelConfig) -> set[str]:
    """Returns the names of modules that a model's blocks lack because of its choice of norms and experts."""
    parts = branches(model.norm_at, model.residual)
    without = {
        **{f"{part.name}_norm": not part.before for part in parts},
        **{f"{part.name}_post_norm": not part.after for part in parts},
        "attention.query_norm": model.qk_norm == "none",
        "attention.key_norm": model.qk_norm == "none",
        "attention.query": model.latent.query_rank > 0,
        **{f"attention.query.{part}": model.latent.query_rank == 0 for part in ("compress", "norm", "expand")},
        "mlp.shared.up": not model.experts.shared_ffn,
        "mlp.shared.down": not model.experts.shared_ffn,
        "mlp.shared_gate": not (model.experts.shared_ffn and model.experts.shared_gate),
    }
    return {name for name, there in without.items() if there}


def parameters_of(model: ResolvedModelConfig, module: str) -> tuple[str, ...]:
    """Returns the names of a module's parameters: weight, and bias if it has one."""
    name = module.rpartition(".")[2]
    shifted = NORM_VECTORS[model.norm] == 2 if name.endswith("norm") else name in model.biases
    of_heads = {each.name: each.shifted for each in head_norms(model, model.qk_norm)}
    return ("weight", "bias") if shifted and of_heads.get(name, True) else ("weight",)
