"""A model for inference: its parts on the ranks of a layout, and logits for each batch of further tokens.

The ranks, groups, layers and messages are those of training. A batch goes through the pipeline as one micro-batch; the next rows depend
on its logits, so stages wait for each other (a larger model fits; one text is not faster).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.build import build_rank
from trainer.comm.collectives import World
from trainer.generate.cache import CacheView, KVCache, place
from trainer.generate.weights import lengths
from trainer.models.attention import capped
from trainer.pipeline.forward import ForwardPipeline
from trainer.pipeline.runtime import Boundary
from trainer.shared.parallel.boundary import Boundary as BoundaryTensors
from trainer.shared.parallel.boundary import PairTokens, boundary_shapes
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.resolved import ResolvedTrainConfig
from trainer.shared.run.schema import ShardingConfig, TuneConfig
from trainer.shared.run.tuning import virtual_tokens
from trainer.state.parameters import OptimizerShard
from trainer.tensor.dropout import DropoutKey


def for_inference(config: ResolvedTrainConfig) -> ResolvedTrainConfig:
    """Removes the settings of training from ``config``: unsharded weights on each replica, one micro-batch, variable shapes."""
    layout = dataclasses.replace(config.layout, micro_batch=1, sequence_parallel=False, recompute="none", sharding=ShardingConfig())
    if layout.virtual_pipeline > 1:
        layout = dataclasses.replace(layout, virtual_pipeline=1, schedule="1f1b", stage_layers=None)
    run = dataclasses.replace(config.run, global_batch=config.layout.data, compile=False, async_tensor=False)
    data = dataclasses.replace(config.data, kind="synthetic", pack=False, task=None)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=0.0), layout=layout, run=run, data=data)


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """Tokens [s, b] on their way through the pipeline (``trainer.pipeline.runtime.Batch``)."""

    rows: Tensor | PairTokens
    logit_cap: float | None

    def tokens(self, micro_batch: int) -> Tensor | PairTokens:
        return self.rows

    def loss(self, x: Tensor, head: nn.Module, micro_batch: int) -> Tensor:
        return capped(head(x), self.logit_cap)

    def dropout_key(self, micro_batch: int) -> DropoutKey:
        return DropoutKey(0, 0)


class Session:
    """This rank's part of a model whose weights ``load`` fills in, with the additions of ``tune``. Virtual tokens of ``task`` precede every
    text without a task of its own."""

    def __init__(
        self,
        config: ResolvedTrainConfig,
        world: World,
        load: Callable[[Sequence[OptimizerShard]], None],
        tune: TuneConfig | None = None,
        task: int = 0,
    ):
        tune = tune or TuneConfig()
        check_task(task, tune.tasks, "--task")
        self.config, self.world = dataclasses.replace(for_inference(config), tune=tune), world
        self.task, self.virtual = task, virtual_tokens(tune)
        self.seq, self.written = lengths(self.config.model, tune)
        self.rank = build_rank(self.config, world)
        world.group.together(lambda: load(self.rank.shards), (ConfigError,))
        self.rank.state.publish_updates()
        self.rank.state.settle()
        self.pipeline = ForwardPipeline.of(self.rank.pipeline, self.rank.recorder)
        self._placed()

    def _placed(self) -> None:
        """Gives the layers of this rank's part a memory in common."""
        self.reading = CacheView(self.world.device)
        for chunk in self.pipeline.chunks:
            place(chunk.model, self.reading)

    @property
    def answers(self) -> bool:
        """Tells whether this rank chooses the tokens of its replica: one rank does."""
        at, layout = self.rank.groups.at, self.config.layout
        return at["pipeline"] == layout.pipeline - 1 and at["tensor"] == 0

    def begin(self, padding: Sequence[int]) -> KVCache:
        """Returns an empty memory of rows with that many tokens of padding on their left."""
        return KVCache(torch.tensor(padding, device=self.world.device))

    def said(self, prompt: Sequence[int], made: Sequence[int]) -> list[int]:
        """Returns the text that the next token continues."""
        return [*prompt, *made]

    def read(
        self, memory: KVCache, tokens: Sequence[Sequence[int]], tasks: Sequence[int | None] = (), every: bool = False
    ) -> Tensor | None:
        """Returns logits [b, V] after the last of some further ``tokens`` [b, s], or [s, b, V] after ``every`` one, on the ranks of the
        last stage. ``tasks`` are those of new texts, if not the session's. Collective over the replica."""
        virtual = 0
        if self.virtual and not memory.read:
            spares, tasks, virtual = memory.padding.tolist(), tasks or [None] * len(tokens), self.virtual
            tokens = [[*row[:spare], *self._virtual(task), *row[spare:]] for spare, task, row in zip(spares, tasks, tokens)]
        self.reading.every = every
        logits = self._forward(memory, tokens)
        return None if logits is None else logits[virtual:] if every else logits[-1]

    def read_all(self, tokens: Sequence[Sequence[int]]) -> Tensor | None:
        """Returns logits [s, b, V] after every token of new texts [b, s], padded on the right; otherwise like ``read``."""
        return self.read(self.begin([0] * len(tokens)), tokens, every=True)

    def _virtual(self, task: int | None) -> list[int]:
        """Returns the placeholders of a text's virtual tokens: its task, repeated (``trainer.models.tuned.Prompts``)."""
        return [self.task if task is None else task] * self.virtual

    def _forward(self, memory: KVCache, tokens: Sequence[Sequence[int]]) -> Tensor | None:
        rows = torch.tensor(tokens, device=self.world.device)
        self.reading.memory = memory
        memory.expect(rows.shape[1])
        logits = self._through(boundary_shapes(rows.shape[1], rows.shape[0], self.config.model.hidden), rows.t())
        memory.read += memory.new
        return logits

    def _through(self, shapes: BoundaryTensors, tokens: Tensor | PairTokens) -> Tensor | None:
        """Runs ``tokens`` [s, b] through the pipeline, whose parts hand on tensors of these ``shapes``."""
        rank = self.rank
        rank.recorder.begin()
        self.pipeline.boundary = Boundary.of(shapes, rank.region, rank.precision.compute, self.world.device)
        outputs = self.pipeline.losses_of(TokenRows(tokens, self.config.model.logit_cap))
        return self._whole(outputs[0]) if outputs else None

    def _whole(self, logits: Tensor) -> Tensor:
        """Gathers [s, b, V/t] of each tensor rank -> [s, b, V] on all of them, without padding."""
        group = self.rank.groups.tensor
        mine = logits.permute(2, 0, 1).contiguous()
        whole = mine.new_empty(mine.shape[0] * group.size, *mine.shape[1:])
        group.all_gather(whole, mine).wait()
        return whole[: self.config.model.vocab].permute(1, 2, 0)


def check_task(task: Any, tasks: int, name: str) -> None:
    """Raises ``ConfigError`` unless a model tuned for ``tasks`` tasks has ``task``, given as ``name``."""
    if not isinstance(task, int) or isinstance(task, bool) or not 0 <= task < tasks:
        tuned = (
            f"tuned for {tasks} tasks, numbered from 0; use 0 to {tasks - 1}" if tasks > 1 else "not tuned for several tasks; leave it out"
        )
        raise ConfigError(f"{name}={repr(task)[:60]}: the model was {tuned}")
