"""How our parameters are called and shaped in the Hugging Face layout of a family, by its record.

Shapes: g key/value heads, q query heads per key/value head, d head size, h hidden, f inner width of the MLP. Our fused matrix of
queries, keys and values is [g, q + 2, d, h]: for each g its queries, one key, one value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from trainer.shared.families.family import MATRICES
from trainer.shared.families.registry import FAMILIES
from trainer.shared.records.model_files import check_named
from trainer.shared.run.schema import NORM_VECTORS, ResolvedModelConfig

FORMS: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "same": lambda w: [w],
    "by kind": lambda w: [w.transpose(0, 1)],  # of as many keys as queries: all queries, then all keys, then all values
    "apart": lambda w: [w[:, :-2], w[:, -2], w[:, -1]],  # queries, keys and values
    "stacked": lambda w: w.unbind(0),  # [2, f, h]: gate and up
}
"""Views of one of ours, each in the order of one of theirs; by the words of ``HubFormat.forms``."""


@dataclass(frozen=True)
class Rule:
    """One of our parameters and the tensors that hold it there: matrices of one row per output, and vectors."""

    ours: str
    theirs: tuple[str, ...]
    form: str = "same"
    inputs_first: bool = False  # matrices there are [in, out]

    def split(self, w: Tensor) -> list[Tensor]:
        """Makes their tensors from ours."""
        if self.ours.endswith(".bias"):
            return [view.flatten() for view in FORMS[self.form](w)]
        parts = [view.flatten(0, -2) if view.dim() > 2 else view for view in FORMS[self.form](w)]
        return [part.t() for part in parts] if self.inputs_first else parts

    def join(self, parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """Makes ours, of this shape, from theirs."""
        w = parts[0].new_empty(shape)
        for view, part in zip(FORMS[self.form](w), parts):
            view.copy_((part.t() if self.inputs_first else part).reshape(view.shape))
        return w


def rules(model: ResolvedModelConfig) -> Iterator[Rule]:
    """The rule of every parameter of ``model``, in the order of the network, ends first."""
    check_named(model.family)
    family = FAMILIES[model.family]
    hub = family.hub
    yield from _rules(model, hub.ends, "", hub.root)
    if not model.tied:
        yield Rule("head.output.weight", (hub.output,))
    for i in range(model.layers):
        yield from _rules(model, hub.block, f"blocks.{i}.", f"{hub.root}{hub.blocks}.{i}.")


def _rules(model: ResolvedModelConfig, modules: Mapping[str, str], here: str, there: str) -> Iterator[Rule]:
    """Rules of the parameters of ``modules``, whose names begin with ``here`` and ``there``."""
    hub = FAMILIES[model.family].hub
    for ours, theirs in modules.items():
        turned = hub.inputs_first and ours.rpartition(".")[2] in MATRICES
        for key in parameters_of(model, ours):
            names = tuple(f"{there}{name}.{key}" for name in theirs.split())
            yield Rule(f"{here}{ours}.{key}", names, hub.forms.get(ours, "same"), turned)


def parameters_of(model: ResolvedModelConfig, module: str) -> tuple[str, ...]:
    """Names of the parameters of a module: weight, and bias if it has one."""
    shifted = NORM_VECTORS[model.norm] == 2 if module.endswith("norm") else module.rpartition(".")[2] in model.biases
    return ("weight", "bias") if shifted else ("weight",)
