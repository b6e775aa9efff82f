"""What a training step asks of a GPU and of its host, counted without one: a plain PyTorch loop beside this trainer.

    python -m benchmarks.counts               # a minute: the compiler writes code for this processor
    python -m benchmarks.counts --quick       # without the compiler

Nothing here is a time. Bytes and the host's reads are those of GPT 1.3B (two of its blocks) and of BLOOM 7B on meta tensors, which have
sizes and no values: a read that is not counted is an error there. Operations of a block are counted while it computes on this processor,
kernels where they run, elements where they are drawn.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.comm.collectives import World
from trainer.data import open_dataset
from trainer.models.attention import Alibi, AttentionCore, slopes
from trainer.models.transformer import Transformer
from trainer.pipeline.compile import compile_blocks
from trainer.shared.parallel.shards import Factors
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.read import from_dict
from trainer.shared.run.resolved import ResolvedTrainConfig
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import LOSS_CHUNK_MB, ModelConfig, TrainConfig
from trainer.state.bucket import FlatBucket
from trainer.state.parameters import ModelParameter
from trainer.state.sharding import ShardedState
from trainer.step import Engine
from trainer.tensor import cross_entropy
from trainer.tensor.block_attention import BlockAttention
from trainer.tensor.dropout import Noise, ShardedAttentionDropout

WIDE: dict[str, Any] = {"layers": 2, "hidden": 2048, "heads": 16, "vocab": 50257, "seq": 2048}
SMALL: dict[str, Any] = {"hidden": 32, "heads": 4, "vocab": 101, "seq": 16}
DRAWN: dict[str, Any] = {"layers": 2, "hidden": 512, "heads": 8, "vocab": 8192, "seq": 128}
BLOOM_7B = (32, 2048, 128)
"""Heads, sequence and head width."""
REPLICAS = 8
MATRICES = ("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_dot_product")
COPIES = ("copy_", "clone", "_to_copy", "cat", "constant_pad_nd")
NO_WORK = (
    "item",
    "_local_scalar_dense",
    "empty",
    "empty_strided",
    "new_empty",
    "empty_like",
    "_unsafe_view",
    "detach",
    "alias",
    "lift_fresh",
    "as_strided",
    "set_",
)


class Seen(TorchDispatchMode):
    """What a computation asks of the device, views and allocations apart, and of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()
        self.reads = self.left = 0  # values for which the host waits; copies to the host for which it does not
        self.largest: Counter[int] = Counter()  # bytes of tensors by their last dimension

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = str(function).split(".")[1]
        if name == "_local_scalar_dense" and arguments[0].is_meta:
            self.reads += 1
            return 1.0
        if name == "copy_" and arguments[1].is_meta and not arguments[0].is_meta:
            self.left += 1
            return arguments[0]
        made = function(*arguments, **(named or {}))
        if not (function.is_view or name in NO_WORK):
            self.launched[name] += 1
            for tensor in tree_leaves(made):
                if isinstance(tensor, Tensor) and tensor.dim() > 1:
                    last = tensor.shape[-1]
                    self.largest[last] = max(self.largest[last], tensor.numel() * tensor.element_size())
        return made

    def of(self, kinds: tuple[str, ...]) -> int:
        return sum(n for name, n in self.launched.items() if name.startswith(kinds))


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    what: str
    plain: int
    now: int
    unit: str = ""


def configured(model: dict[str, Any], **run: Any) -> ResolvedTrainConfig:
    """Two micro-batches of one sequence, in fp32."""
    plain = {"model": {"tied": False} | model, "data": {"kind": "synthetic"}, "run": {"global_batch": 2, "device": "cpu", "seed": 1} | run}
    return resolve(from_dict(TrainConfig, plain), 1)


def engine_of(config: ResolvedTrainConfig, device: str = "cpu") -> Engine:
    world = World(0, 1, torch.device(device), "", 0, 10.0)
    return Engine(config, world, open_dataset(config.data, config.model, 1), draws=device == "cpu")


def plain_parts(config: ResolvedTrainConfig, device: str = "cpu") -> tuple[Transformer, Callable[[], list[Tensor]]]:
    """What anybody would write: autograd, and cross entropy over all logits of a micro-batch. The model, and its gradients and losses."""
    with torch.device(device):
        model = Transformer(config.model)
        rows = torch.zeros(config.model.seq + 1, 1, dtype=torch.long)

    def gradients() -> list[Tensor]:
        losses = []
        for _ in range(config.run.global_batch):
            loss = F.cross_entropy(model(rows[:-1]).flatten(0, 1), rows[1:].flatten()) / config.run.global_batch
            loss.backward()
            losses.append(loss.detach())
        return losses

    return model, gradients


def plain_step(config: ResolvedTrainConfig) -> Callable[[], float]:
    """A whole step of it on meta tensors: clipping, AdamW, and the loss read for the log."""
    model, gradients = plain_parts(config, "meta")
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> float:
        losses = gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).sum())

    return step


def of_a_step() -> list[Row]:
    """Host and logits of a step, at full width."""
    config, seen = configured(WIDE, loss_chunk_mb=LOSS_CHUNK_MB["cuda"] / 8), []
    with mock.patch.dict(cross_entropy.CACHED_BYTES, meta=cross_entropy.CACHED_BYTES["cuda"]):
        for step in (plain_step(config), partial(engine_of(config, "meta").queue, 0)):
            with Seen() as one:
                step()
            seen.append(one)
    plain, ours = seen
    padded = max(ours.largest[width] for width in (50257, 50304))
    return [
        Row("values that the host waits for, in a step", plain.reads, ours.reads),
        Row("copies to the host that are read a step later", plain.left, ours.left),
        Row("largest tensor of logits or their gradient (128 MiB asked for)", plain.largest[50257], padded, "bytes"),
    ]


def of_a_block(model: dict[str, Any]) -> list[Row]:
    """Operations of one block in forward and backward of one micro-batch: what a second block adds."""
    seen = []
    for layers in (1, 2):
        config = configured(SMALL | model | {"layers": layers})
        engine = engine_of(config)
        batch = engine.batches.read(0)
        for compute in (plain_parts(config)[1], lambda: engine.gradients(batch)):  # noqa: B023  it is called here
            with Seen() as one:
                compute()
            seen.append(one)
    return [
        Row(f"{what} of a block ({model.get('family', 'gpt')}), eager", *((seen[2 + i].of(kinds) - seen[i].of(kinds)) // 2 for i in (0, 1)))
        for what, kinds in (("operations", ("",)), ("matrix products and attention", MATRICES), ("copies", COPIES))
    ]


def of_alibi() -> list[Row]:
    """Bytes that ALiBi adds to attention in bf16."""
    heads, seq, width = BLOOM_7B
    with torch.device("meta"):
        steep = torch.empty(heads, dtype=torch.bfloat16)
        assert len(slopes(heads)) == heads
        bias = steep[:, None, None] * (torch.arange(seq)[None, :] - torch.arange(seq)[:, None]).to(torch.bfloat16)
        query, key = (torch.empty(1, heads, seq, width, dtype=torch.bfloat16) for _ in range(2))
        wide = Alibi(heads, width**-0.5)(query, key, range(heads))
    return [
        Row(
            "ALiBi in a block of BLOOM 7B (bias; columns of queries and keys)",
            bias.nbytes,
            sum(t.nbytes for t in wide) - query.nbytes - key.nbytes,
            "bytes",
        )
    ]


def of_attention_dropout() -> list[Row]:
    """Bytes of attention with dropout in one block of GPT 1.3B, bf16, where scores are spelled out and in blocks of queries."""
    heads, seq = WIDE["heads"], WIDE["seq"]
    model = ModelConfig(hidden=WIDE["hidden"], heads=heads, positions="none", dropout=0.1)
    plain, ours = (AttentionCore(resolve_model(replace(model, attention=kind))) for kind in ("unfused", "fused"))
    ours.dropout = ShardedAttentionDropout(0.1, "core", Noise(1), ours.heads, heads)
    ours.in_blocks = BlockAttention(ours.dropout)
    found = []
    for core in (plain, ours):
        kept: dict[int, int] = {}
        triple = [torch.empty(seq, 1, heads, WIDE["hidden"] // heads, dtype=torch.bfloat16, device="meta") for _ in range(3)]
        with Seen() as seen, torch.autograd.graph.saved_tensors_hooks(partial(_note, kept), lambda tensor: tensor):
            core(*(each.requires_grad_() for each in triple)).sum().backward()
        found.append((sum(kept.values()), max(seen.largest.values())))
    (kept_plain, largest_plain), (kept_ours, largest_ours) = found
    return [
        Row("kept for backward by attention with dropout in a block", kept_plain, kept_ours, "bytes"),
        Row("largest tensor of attention with dropout", largest_plain, largest_ours, "bytes"),
    ]


def _note(kept: dict[int, int], tensor: Tensor) -> Tensor:
    """Count the bytes of a storage that autograd keeps."""
    kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return tensor


def of_start() -> list[Row]:
    """Elements that the rank draws which draws most, of 8 replicas that share the optimizer state."""
    config = configured(DRAWN)
    engine = engine_of(config)
    plain = sum(p.numel() for p in Transformer(config.model).parameters() if p.dim() > 1)
    most = max(sum(numbers) for numbers in (drawn(engine, rank) for rank in range(REPLICAS)))
    return [Row(f"random numbers drawn at the start by one of {REPLICAS} replicas", plain, most)]


def drawn(engine: Engine, replica: int) -> Iterator[int]:
    """How many numbers this replica of a sharded state draws, call by call."""
    settings = replace(engine.rank.state.settings["data"], factors=Factors(1, 1, REPLICAS, REPLICAS), data_index=replica)
    state = ShardedState({"data": settings}, 25 << 20)
    found = {p.record.name: p for _, parameters, _ in engine.rank.state.plans for p in parameters.values()}
    state.add_model_part([ModelParameter(p.record, torch.nn.Parameter(torch.empty(0)), p.units[0]) for p in found.values()])
    state.make()
    numbers, randn = [], torch.randn

    def noted(n: int, **named: Any) -> Tensor:
        numbers.append(n)
        return randn(n, **named)

    with mock.patch.object(torch, "randn", noted):
        for bucket in state.buckets:
            assert isinstance(bucket, FlatBucket)
            bucket.initialize(1)
    yield from numbers


def of_compiled_block() -> list[Row]:
    """Graphs of two blocks, and the kernels of one in forward and backward of one micro-batch, in the code that the compiler writes."""
    graphs, kernels = [], []
    for make in (plain_compiled, ours_compiled):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        one, two = (kernels_of(make(configured(SMALL | {"layers": layers}, compile=True))) for layers in (1, 2))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        kernels.append((two - one) // 2)
    return [Row("graphs of all blocks", graphs[0], graphs[1]), Row("kernels of a block (gpt), compiled", kernels[0], kernels[1])]


def plain_compiled(config: ResolvedTrainConfig) -> Callable[[], Any]:
    model, gradients = plain_parts(config)
    compile_blocks(model.blocks, True, False, torch.device("cpu"))
    return gradients


def ours_compiled(config: ResolvedTrainConfig) -> Callable[[], Any]:
    engine = engine_of(config)
    return partial(engine.gradients, engine.batches.read(0))


def kernels_of(compute: Callable[[], Any]) -> int:
    """Kernels that run, once all is compiled: compiled ones, and operations that have no other one inside."""
    compute()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        compute()
    return sum(_kernels(event) for event in seen.events() if event.cpu_parent is None)


def _kernels(event: Any) -> int:
    whole = event.name.startswith("aten::_scaled_dot_product")  # on a GPU; here it calls others
    return (0 if whole else sum(map(_kernels, event.cpu_children))) or int(_works(event.name))


def _works(name: str) -> bool:
    if "cpp_fused" in name:
        return True
    space, _, operation = name.partition("::")
    packet = getattr(torch.ops.aten, operation, None) if space == "aten" else None
    return packet is not None and operation not in NO_WORK and not any(getattr(packet, each).is_view for each in packet.overloads())


def table(rows: list[Row]) -> str:
    lines = [f"{'':72}{'plain':>14}{'now':>14}"]
    for row in rows:
        lines.append(f"{row.what:72}{row.plain:>14,}{row.now:>14,}  {row.unit}".rstrip())
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="without compiling")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    torch._inductor.config.cpp.enable_kernel_profile = True
    rows = [*of_a_step(), *of_a_block({}), *of_a_block({"family": "llama"}), *of_alibi(), *of_attention_dropout(), *of_start()]
    print(table(rows + ([] if quick else of_compiled_block())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
