"""Shapes of models by number of parameters: a published shape of the family if there is one, else interpolation.

The rules, in order:
  1. Within 4 % of a published model with the wanted vocabulary, that model's shape; 3 % in a family of rule 4.
  2. Else the hidden size is interpolated linearly over log parameters and log hidden between the published ones (beyond the last one,
     hidden grows with the cube root of the parameters, so that depth and width grow alike), and so is the width of a head.
  3. Among hidden sizes nearby (multiples of 8 heads, so that 8 tensor ranks divide them; of 4 below hidden 2048) and all depths,
     the shape with the smallest misfit: |log size error| + |log hidden error| / 4, and 0.04 more for an odd depth or 0.015 for one
     that 4 does not divide.
  4. A family whose published MLPs have no common share of the hidden size (T5) has the share interpolated as in 2., moved by up to
     ``WIDER`` towards the size; what it is moved counts as a misfit as that of the hidden size does.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache

from launcher.cost.inputs.shape import Shape
from trainer.shared.families.family import FamilyDefaults, ReferenceModel
from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError, listed, nearest
from trainer.shared.run.schema import ModelConfig

FAMILY_DEFAULTS = {name: family.published for name, family in FAMILIES.items() if family.published is not None}
"""Families with published models."""
SAME_SIZE, SAME_FITTED, WRONG_SIZE = 0.04, 0.029, 0.15
WIDER = 0.15
HEAD_WIDTHS = (32, 64, 80, 96, 128, 160, 192, 256)
SMALLEST, LARGEST = 1e6, 2e13


def family_defaults(family: str) -> FamilyDefaults:
    """Returns the published models and defaults of ``family``; ``ConfigError`` for an unknown one."""
    if family not in FAMILY_DEFAULTS:
        raise ConfigError(f"family={family!r} is not one of {listed(FAMILY_DEFAULTS)}{nearest(family, FAMILY_DEFAULTS)}")
    return FAMILY_DEFAULTS[family]


def shape_for(family: str, parameters: float, vocab: int | None = None, seq: int | None = None) -> ModelConfig:
    """Returns the model of ``family`` with about ``parameters`` parameters (embeddings, biases and norms included)."""
    defaults = family_defaults(family)
    seq = seq or defaults.seq
    if not SMALLEST <= parameters <= LARGEST:
        raise ConfigError(f"a model of {parameters:.3g} parameters is outside the known range; ask for {SMALLEST:g} to {LARGEST:g}")
    vocab = vocab or defaults.vocab
    share = interpolate(family, parameters, lambda a: (a.ffn or 0) / a.hidden, vocab=vocab) if defaults.models[0].ffn else None
    for published, own in _published(family, seq, vocab):
        if abs(math.log(own / parameters)) <= (SAME_SIZE if share is None else SAME_FITTED):
            return dataclasses.replace(published)
    hidden = interpolate(family, parameters, lambda a: a.hidden, beyond=1 / 3, vocab=vocab)
    width = interpolate(family, parameters, lambda a: a.head_width or a.hidden / a.heads, beyond=1 / 12, vocab=vocab)
    around = _nearby(family, parameters, hidden, width, share, vocab, seq)
    best = min(around, key=lambda model: _misfit(model, parameters, hidden, share))
    if abs(math.log(count(best) / parameters)) > WRONG_SIZE:
        raise ConfigError(
            f"no {family} of {parameters:.3g} parameters with a vocabulary of {vocab}: the nearest has {count(best):.3g}; "
            "ask for a larger model, a smaller vocabulary or another family"
        )
    return best


def count(model: ModelConfig) -> float:
    """Counts the parameters of ``model`` by the cost model's formula."""
    return float(Shape.of(model).parameters)


def build_reference(family: str, reference: ReferenceModel, seq: int) -> ModelConfig:
    """Returns a published model, with its own vocabulary."""
    vocab = FAMILY_DEFAULTS[family].vocab
    model = build(family, reference.layers, reference.hidden, reference.heads, vocab, seq)
    return dataclasses.replace(model, ffn=reference.ffn or model.ffn, head_width=reference.head_width or model.head_width)


def build(family: str, layers: int, hidden: int, heads: int, vocab: int, seq: int, share: float | None = None) -> ModelConfig:
    """Returns a model with the family's MLP width, or this ``share`` of the hidden size, and key/value heads filled in."""
    defaults = FAMILY_DEFAULTS[family]
    multiple = defaults.ffn_multiple
    ffn = multiple * math.ceil(round((share or 8 / 3) * hidden / multiple, 9)) if multiple else 4 * hidden
    model = resolve_model(ModelConfig(family, layers, hidden, heads, heads, ffn, vocab, seq))
    if defaults.grouped_above is not None and heads % 8 == 0 and count(model) > defaults.grouped_above:
        # grouped queries free parameters, which go to the MLP: Llama 2 70B has 1.3 times the width, Llama 3.1 405B 1.22 times
        model = dataclasses.replace(model, kv_heads=8, ffn=multiple * math.ceil(1.25 * (ffn or 1) / multiple) if multiple else ffn)
    return model


def interpolate(
    family: str, parameters: float, value: Callable[[ReferenceModel], float], beyond: float = 0.0, vocab: int | None = None
) -> float:
    """Interpolates ``value`` of the published models, with a vocabulary of ``vocab``, at ``parameters``, linearly over logarithms.

    Outside of them, returns the nearest model's value times (its size ratio) ** ``beyond``.
    """
    defaults = FAMILY_DEFAULTS[family]
    published = _published(family, defaults.seq, vocab or defaults.vocab)
    return log_interpolate([(own, value(a)) for (_, own), a in zip(published, defaults.models)], parameters, beyond)


@cache
def _published(family: str, seq: int, vocab: int) -> list[tuple[ModelConfig, float]]:
    """Returns the published models with another length and vocabulary, each with its parameters."""
    models = [dataclasses.replace(build_reference(family, a, seq), vocab=vocab) for a in FAMILY_DEFAULTS[family].models]
    return [(model, count(model)) for model in models]


def log_interpolate(points: list[tuple[float, float]], x: float, beyond: float = 0.0) -> float:
    """Interpolates linearly over log x and log y (ascending x); outside, returns y of the end point times (x ratio) ** ``beyond``."""
    if x <= points[0][0] or x >= points[-1][0]:
        end_x, end_y = points[0] if x <= points[0][0] else points[-1]
        return end_y * (x / end_x) ** beyond
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            return y0 * (y1 / y0) ** (math.log(x / x0) / math.log(x1 / x0))
    raise AssertionError("points ascend")


def _nearby(
    family: str, parameters: float, hidden: float, width: float, share: float | None, vocab: int, seq: int
) -> Iterator[ModelConfig]:
    """Yields shapes around the wanted hidden size, each with the two depths whose size is next to ``parameters``."""
    head = min(HEAD_WIDTHS, key=lambda w: abs(math.log(w / width)))
    group = 8 if hidden >= 2048 else 4
    middle, least = max(1, round(hidden / (head * group))), 2 if FAMILIES[family].encoder_decoder else 1
    for multiple in range(max(1, middle - 2), middle + 3):
        heads = group * multiple
        one, two = (build(family, layers, heads * head, heads, vocab, seq, share) for layers in (2, 4))
        block = (count(two) - count(one)) / 2
        depth = (parameters - count(one)) / block + 2
        for layers in range(max(least, math.floor(depth) - 3), max(least, math.ceil(depth) + 3) + 1):
            made = build(family, layers, heads * head, heads, vocab, seq, share)
            yield made if share is None else _refined(made, parameters)


def _refined(model: ModelConfig, parameters: float) -> ModelConfig:
    """Returns ``model`` with the width of its MLP that brings it nearest to ``parameters``, changed by up to ``WIDER``."""
    step = FAMILY_DEFAULTS[model.family].ffn_multiple or 1
    ffn = model.ffn or 0
    steps = (parameters - count(model)) / (count(dataclasses.replace(model, ffn=ffn + step)) - count(model))
    most = WIDER * ffn / step
    return dataclasses.replace(model, ffn=ffn + step * round(max(-most, min(most, steps))))


def _misfit(model: ModelConfig, parameters: float, hidden: float, share: float | None) -> float:
    odd = 0.04 if model.layers % 2 else 0.015 if model.layers % 4 else 0.0
    wider = 0.0 if share is None else abs(math.log((model.ffn or 0) / (share * model.hidden))) / 4
    return abs(math.log(count(model) / parameters)) + abs(math.log(model.hidden / hidden)) / 4 + wider + odd
