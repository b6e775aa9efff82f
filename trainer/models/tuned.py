"""Adds tuning to a plain model, from outside: the model and its families know nothing of it.

The model's parameters keep their names, so the weights of a base fit. Only the new parameters are trained.

lora      ``y += alpha / rank B A x`` in parallel to a matrix (Hu et al. 2021)
adapter   ``y += up(gelu(down(norm(y))))`` on the output of attention and of the MLP (Houlsby et al. 2019)
ia3       keys, values and the MLP's inner activation times a vector (Liu et al. 2022)
prompt    the first positions are vectors of their own (Lester et al. 2021)
p_tuning  as prompt, but the vectors come out of an encoder (Liu et al. 2021)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.models.attention import Attention
from trainer.models.layers import Init, Linear, ParameterModule, ParameterSpec, gelu, norm
from trainer.models.transformer import Transformer
from trainer.shared.parallel.placement import Partial, Shard
from trainer.shared.parallel.sequence import Runs, with_rows
from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import TuneConfig

PLACES = {"qkv": "attention.qkv", "output": "attention.output", "up": "mlp.up", "down": "mlp.down"}
"""Paths in a block of the matrices that ``tune.targets`` names."""
PROMPT_STD = 0.02
"""Standard deviation of initial virtual tokens, as of the embeddings of GPT-2."""


class LowRankLinear(Linear):
    """A linear layer with a parallel low-rank product, which begins as zero. The factor on the side where the matrix is cut is cut too."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def __init__(self, plain: Linear, tune: TuneConfig):
        super().__init__(plain.inputs, plain.outputs, plain.specs["weight"].init.std, plain.bias is not None, plain.cut)
        self.scale, self.dropout = tune.alpha / tune.rank, tune.dropout
        assert plain.cut is not None
        a, b = (Shard(1), Partial()) if plain.cuts_inputs else (Partial(), plain.cut)
        std = 1 / math.sqrt(3 * plain.inputs)  # that of Kaiming's uniform
        self.own("lora_a", (tune.rank, plain.inputs), ParameterSpec(Init(std), "matrices", {"tensor": a}))
        self.own("lora_b", (*plain.outputs, tune.rank), ParameterSpec(Init(), "matrices", {"tensor": b}))


class Adapter(nn.Module):
    """A bottleneck on [s, b, h]; it begins as the identity."""

    def __init__(self, c: ResolvedModelConfig, width: int):
        super().__init__()
        self.norm = norm(c)
        self.down = Linear(c.hidden, (width,), 1 / math.sqrt(c.hidden), bias=False)
        self.up = Linear(width, (c.hidden,), 0.0, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.up(gelu(self.down(self.norm(x))))
        return y


class VectorScale(ParameterModule):
    """Multiplies the last dimensions of x by a vector that begins as one; tensor ranks share its first dimension."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.own("weight", shape, ParameterSpec(Init(value=1.0), placement={"tensor": Shard(0)}))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class KeyValueScale(VectorScale):
    """Scales keys and values in the output [s, b, g, q + 2, d] of ``qkv``."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x[..., :-2, :], x[..., -2:, :] * self.weight), dim=-2)


class VirtualTokens(ParameterModule):
    """Virtual tokens [1, n, h] of a task."""

    def __init__(self, tokens: int, hidden: int):
        super().__init__()
        self.own("weight", (1, tokens, hidden), ParameterSpec(Init(PROMPT_STD), "embedding"))

    def forward(self) -> Tensor:
        return self.weight


class EncodedTokens(VirtualTokens):
    """Virtual tokens that come out of a perceptron with one hidden layer."""

    def __init__(self, tokens: int, hidden: int, width: int):
        super().__init__(tokens, hidden)
        self.up = Linear(hidden, (width,), 1 / math.sqrt(hidden))
        self.down = Linear(width, (hidden,), 1 / math.sqrt(width))

    def forward(self) -> Tensor:
        encoded: Tensor = self.down(torch.relu(self.up(self.weight)))
        return encoded


class Prompts(nn.Module):
    """Virtual tokens [tasks, n, h], with separate parameters for each task. ``written`` puts those of each row's task into its first
    positions."""

    def __init__(self, tasks: list[VirtualTokens]):
        super().__init__()
        self.runs: Callable[[int], Runs] = lambda rows: (range(rows),)  # positions of so many rows of this rank
        self.positions: Callable[[], Tensor] | None = None  # of each token in its text, [s, b], where it differs from the place in the row
        self.tasks = nn.ModuleList(tasks)

    def forward(self) -> Tensor:
        return torch.cat([task() for task in self.tasks])

    def written(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Writes virtual tokens into x [s, b, h], this rank's part of the embedded tokens [s, b]; where virtual tokens stand, those are the
        row's task."""
        every = self()
        if self.positions is not None:
            tasks, count, _ = every.shape
            at = self.positions()
            return torch.where((at < count)[..., None], every[tokens.clamp(max=tasks - 1), at.clamp(max=count - 1)], x)
        values, parts = every[tokens[0].clamp(max=len(every) - 1)].transpose(0, 1), []  # [n, b, h]
        for rows, run in with_rows(self.runs(x.shape[0])):
            written = values[run.start : run.stop]
            parts += [written, x[rows.start + len(written) : rows.stop]]
        return torch.cat(parts)


def task_of(name: str) -> int:
    """Returns the task that a parameter belongs to; 0 if it belongs to none."""
    return int(name.split(".")[3]) if name.startswith("embedding.prompts.tasks.") else 0


def add_tuning(model: Transformer, c: ResolvedModelConfig, tune: TuneConfig) -> frozenset[str] | None:
    """Adds the trained parameters to ``model`` and returns their names, or None where all parameters are trained."""
    if tune.method == "full":
        return None
    before = {name for name, _ in model.named_parameters()}
    if tune.method in BLOCKS:
        for block in model.blocks.values():
            BLOCKS[tune.method](block, c, tune)
    elif model.embedding is not None:
        sizes = tune.virtual_tokens, c.hidden
        tasks = [VirtualTokens(*sizes) if tune.method == "prompt" else EncodedTokens(*sizes, tune.encoder) for _ in range(tune.tasks)]
        model.embedding.prompts = Prompts(tasks)
        model.embedding.tokens.register_forward_hook(_write_prompts(model.embedding.prompts))
    return frozenset(name for name, _ in model.named_parameters()) - before


def _write_prompts(prompts: Prompts) -> Callable[[nn.Module, tuple[Tensor], Tensor], Tensor]:
    return lambda module, inputs, x: prompts.written(inputs[0], x)


def _add_low_rank(block: Any, c: ResolvedModelConfig, tune: TuneConfig) -> None:
    for target in tune.targets:
        half, _, name = PLACES[target].partition(".")
        parent = block.get_submodule(half)
        setattr(parent, name, LowRankLinear(getattr(parent, name), tune))


def _add_adapters(block: Any, c: ResolvedModelConfig, tune: TuneConfig) -> None:
    block.attention_adapter, block.mlp_adapter = Adapter(c, tune.rank), Adapter(c, tune.rank)
    block.attention.register_forward_hook(lambda module, inputs, x: block.attention_adapter(x))
    block.mlp.register_forward_hook(lambda module, inputs, x: block.mlp_adapter(x))


def _add_scales(block: Any, c: ResolvedModelConfig, tune: TuneConfig) -> None:
    assert isinstance(block.attention, Attention)
    block.attention.scale = KeyValueScale((c.kv_heads, 2, c.head_width))
    block.mlp.scale = VectorScale((c.ffn,))
    block.attention.qkv.register_forward_hook(lambda module, inputs, x: block.attention.scale(x))
    block.mlp.down.register_forward_pre_hook(lambda module, inputs: block.mlp.scale(inputs[0]))


BLOCKS = {"lora": _add_low_rank, "adapter": _add_adapters, "ia3": _add_scales}
"""Functions that add to each block, by method."""
