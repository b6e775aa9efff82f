"""One question to the cost model: a model, many layouts, a batch, a device, a trainer. Derived sizes by name.

Shapes: ``np.ndarray`` is one number per layout, (layouts,); ``Array`` is that, or one number for all layouts; ``float`` is a scalar.
Lengths are those of one rank and one micro-batch unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from launcher.config.trainer import TrainerProfile
from launcher.cost.inputs.constants import SHIPPED, Constants
from launcher.cost.inputs.device import BYTES, Device
from launcher.cost.inputs.groups import PlacedGroup
from launcher.cost.inputs.shape import Array, Shape
from trainer.shared.parallel.shards import vocabulary_rows
from trainer.shared.run.schema import RECOMPUTE, SCHEDULES


@dataclass(frozen=True)
class Case:
    """``table`` is a structured array (layouts,) of ``LAYOUT_DTYPE``; ``global_batch`` and the sizes of ``shape`` are numbers, or
    (layouts,)."""

    shape: Shape
    table: np.ndarray
    global_batch: Array
    device: Device
    trainer: TrainerProfile
    precision: str = "bf16"
    constants: Constants = SHIPPED
    budget: float = np.inf  # bytes that the trainer may count before it stops itself (run.memory_gb)
    stage_blocks: Array | None = None  # blocks of the pipeline rank in question; None: the mean

    @cached_property
    def stacks(self) -> tuple[Case, ...]:
        """Asks the same about each stack of the model by itself; the last one has the head."""
        shapes = self.shape.stacks
        return (self,) if len(shapes) == 1 else tuple(replace(self, shape=shape) for shape in shapes)

    def field(self, name: str) -> np.ndarray:
        return self.table[name].astype(float)

    @cached_property
    def tensor(self) -> np.ndarray:
        return self.field("tensor")

    @cached_property
    def vocabulary(self) -> Array:
        """Rows of embedding and head on a tensor rank."""
        padded = self.trainer.memory.padded_vocabulary
        rows: Array = vocabulary_rows(self.shape.vocab, self.tensor) if padded else self.shape.vocab / self.tensor
        return rows

    @cached_property
    def pipeline(self) -> np.ndarray:
        return self.field("pipeline")

    @cached_property
    def chunks(self) -> np.ndarray:
        """Model chunks per pipeline rank."""
        return self.field("virtual_pipeline")

    @cached_property
    def data(self) -> np.ndarray:
        return self.field("data")

    @cached_property
    def context(self) -> np.ndarray:
        return self.field("context")

    @cached_property
    def expert(self) -> np.ndarray:
        return self.field("expert")

    @cached_property
    def expert_tensor(self) -> np.ndarray:
        """Ranks over which each expert is cut."""
        return self.field("expert_tensor") if self.trainer.memory.whole_experts else self.tensor

    @cached_property
    def expert_split(self) -> np.ndarray:
        """Over how many tensor ranks the tokens are spread that go to experts. Where a layout cuts experts, ranks with parts of the same
        have each other's tokens, be those of tensor ranks or of others."""
        return self.tensor / self.expert_tensor if self.trainer.memory.whole_experts else self.sequence_split

    @cached_property
    def imbalance(self) -> Array:
        """Tokens of the busiest expert rank over their mean. Ranks that have all experts are equally busy."""
        return 1.0 if self.shape.experts is None else np.where(self.expert > 1, self.shape.experts.imbalance, 1.0)

    @cached_property
    def experts_alike(self) -> np.ndarray:
        """Ranks of a stage that hold the same experts, or the same part of them: tensor x context x data = expert tensor x expert x these
        (arXiv 2504.14960, section 3.2)."""
        return np.maximum(self.tensor * self.context * self.data / (self.expert_tensor * self.expert), 1)

    @cached_property
    def micro_batch(self) -> np.ndarray:
        return self.field("micro_batch")

    @cached_property
    def slices(self) -> np.ndarray:
        """Slices of every sequence."""
        return np.maximum(self.field("slices"), 1.0)

    @cached_property
    def reach(self) -> np.ndarray:
        """Share of the keys of a sequence up to the end of a slice, the mean of equal slices."""
        return (1 + 1 / self.slices) / 2

    @cached_property
    def micro_batches(self) -> np.ndarray:
        """Micro-batches of one replica per step; a slice of one counts as one, for the pipeline computes it alone."""
        return np.maximum(self.global_batch / (self.micro_batch * self.data), 1.0) * self.slices

    @cached_property
    def kept_whole(self) -> np.ndarray:
        """Layouts whose sharded parameters are gathered once per step."""
        return self.trainer.pipeline.whole_parameters & (self.pipeline > 1) & (self.field("params") > 1)

    @cached_property
    def reduced_last(self) -> np.ndarray:
        """Layouts whose sharded gradients stay whole until a stage's last backward, and are reduced once per step, be the parameters
        sharded or not."""
        return self.trainer.pipeline.whole_parameters & (self.pipeline > 1) & (self.field("grads") > 1)

    @cached_property
    def interleaved(self) -> np.ndarray:
        return self.chunks > 1

    def shard(self, name: str, dense: Array, expert: Array) -> Array:
        """Parameters of which one rank holds that state, of ``dense`` ones and those of its routed experts, which fewer ranks share."""
        return dense / self.field(name) + expert / self.expert_shards(name)

    def expert_shards(self, name: str) -> np.ndarray:
        """Shards of a state of the experts of a rank: as many as of others, but for the ranks that have other experts."""
        shards = self.field(name)
        return np.where(shards > 1, np.maximum(shards * self.tensor / self.expert_tensor / self.expert, 1), 1.0)

    def scheduled(self, name: str) -> np.ndarray:
        return self.table["schedule"] == SCHEDULES.index(name)

    def recomputes(self, name: str) -> np.ndarray:
        return self.table["recompute"] == RECOMPUTE.index(name)

    @cached_property
    def blocks_per_chunk(self) -> np.ndarray:
        if self.stage_blocks is not None:
            return self.stage_blocks / self.chunks
        return self.shape.layers / (self.pipeline * self.chunks)

    @cached_property
    def recomputes_some(self) -> bool:
        """True if some layout recomputes only some of its blocks: then it matters how many a rank has."""
        return bool(np.any((self.table["recompute_layers"] >= 0) | (self.table["recompute_every"] > 1)))

    @cached_property
    def recomputed_per_chunk(self) -> np.ndarray:
        """Blocks of a chunk that are recomputed whole: every so many of the first."""
        given, every = self.table["recompute_layers"], np.maximum(self.table["recompute_every"], 1)
        first = np.where(given < 0, self.blocks_per_chunk, np.minimum(given, self.blocks_per_chunk))
        return np.where(self.recomputes("full"), np.minimum(np.ceil(first / every), self.blocks_per_chunk), 0.0)

    @cached_property
    def recomputed_blocks(self) -> np.ndarray:
        """Fraction of the blocks that are recomputed whole."""
        return self.recomputed_per_chunk / np.maximum(self.blocks_per_chunk, 1e-9)  # a rank may have no block

    @cached_property
    def blocks_behind(self) -> np.ndarray:
        """Blocks of a chunk behind the last one that is recomputed whole."""
        every = np.maximum(self.table["recompute_every"], 1)
        return np.maximum(self.blocks_per_chunk - every * (self.recomputed_per_chunk - 1) - 1, 0.0)

    @cached_property
    def tokens(self) -> np.ndarray:
        """Tokens of a micro-batch, or of a mean slice of one, on one context rank."""
        return self.micro_batch * self.shape.seq / self.context / self.slices

    @cached_property
    def chunk_tokens(self) -> Array:
        """Tokens of a chunk of head and loss; chunks are equal."""
        most = self.trainer.memory.logit_chunk_bytes
        if most is None:
            return self.tokens
        width = self.vocabulary if self.trainer.memory.sharded_logits else self.shape.vocab
        return self.tokens / np.ceil(self.tokens / np.maximum(np.floor(most / (4 * width)), 1))

    @cached_property
    def sequence_split(self) -> np.ndarray:
        """Over how many tensor ranks norms, residuals and dropout are spread."""
        return np.where(self.table["sequence_parallel"], self.tensor, 1.0)

    @cached_property
    def width(self) -> float:
        """Bytes of an activation element: 2 in every mixed precision, fp8 included."""
        return max(BYTES[self.precision], 2)

    @property
    def stored_in_8_bits(self) -> bool:
        """True if the matrices of blocks are kept in 8 bits. Those trained in 4 are not."""
        return self.trainer.numbers.stores_low_precision and self.precision == "fp8"

    @cached_property
    def wide(self) -> bool:
        """Full-precision training: no master weights, 4- or 8-byte everything."""
        return BYTES[self.precision] > 2

    @property
    def average_bytes(self) -> float:
        """Bytes per parameter of an average of weights; 0 without one."""
        return self.trainer.numbers.averages_weights * (self.width if self.wide else 4)

    @property
    def orthogonal(self) -> int:
        """Iterations in which the momentum of matrices, their only moment, is orthogonalised; 0 = none."""
        return self.trainer.numbers.orthogonal_steps

    @property
    def gradient_bytes(self) -> float:
        """Bytes of a gradient in its buffer, in mixed precision."""
        return self._at_least(self.trainer.numbers.gradient_bytes)

    @property
    def reduce_bytes(self) -> float:
        """Bytes of a gradient on the wire, in mixed precision."""
        return self._at_least(self.trainer.numbers.reduce_bytes)

    def _at_least(self, told: float) -> float:
        return max(told, 4) if self.trainer.numbers.wide_unless_fp16 and self.precision != "fp16" else told

    @property
    def vector_precision(self) -> str:
        """Array format of attention and head: low-precision training keeps them in 16 bits."""
        return "bf16" if self.precision in ("fp8", "fp4") else self.precision

    @cached_property
    def tensor_group(self) -> PlacedGroup:
        return PlacedGroup.of(self.device, self.tensor, 1)

    @cached_property
    def context_group(self) -> PlacedGroup:
        return PlacedGroup.of(self.device, self.context, self.tensor)

    @cached_property
    def expert_group(self) -> PlacedGroup:
        return PlacedGroup.of(self.device, self.expert, self.expert_tensor)

    @cached_property
    def expert_tensor_group(self) -> PlacedGroup:
        return PlacedGroup.of(self.device, self.expert_tensor, 1)

    def expert_data_group(self, size: Array, apart: Array = 1) -> PlacedGroup:
        """``size`` ranks with the same experts, each ``apart`` such ranks from the next."""
        stride = self.data_stride / self.context / self.tensor * self.expert_tensor * self.expert
        return PlacedGroup.of(self.device, size, stride * apart)

    @cached_property
    def data_stride(self) -> np.ndarray:
        """Ranks between neighbouring replicas."""
        inner = self.tensor * self.context
        return np.where(self.table["order"] == 0, inner, inner * self.pipeline)

    def data_group(self, size: Array, stride: Array = 1) -> PlacedGroup:
        """``size`` replicas, each ``stride`` replicas from the next."""
        return PlacedGroup.of(self.device, size, self.data_stride * stride)

    @cached_property
    def stages_apart(self) -> np.ndarray:
        """True where a stage and the next lie in different link domains."""
        stride = np.where(self.table["order"] == 0, self.tensor * self.context * self.data, self.tensor * self.context)
        return stride * self.pipeline > self.device.domain
