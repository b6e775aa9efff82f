"""Side by side, in one run: this trainer under several layouts and what a user would pick instead.

    python benchmarks/trainer.py                       # CPU: tokens per CPU-second, summed over ranks
    python benchmarks/trainer.py --peers deepspeed olmo   # adds peers, if they are installed

The model is the one of issue and facts: 4 layers, hidden 256, sequence 256, vocabulary 50304, micro-batch 4, 4096 tokens a step,
untied, fp32, AdamW with clipping, one thread per rank. The plain loop is the same model, from ``trainer.models``, with torch's
own loss and optimizer. Each contestant runs in fresh processes; the first steps are left out and the best step counts, because
on a shared machine the others say how busy the neighbours are. Rounds alternate between contestants for the same reason.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

MODEL = {"family": "gpt", "layers": 4, "hidden": 256, "heads": 4, "vocab": 50304, "seq": 256, "tied": False}
GLOBAL_BATCH, MICRO_BATCH, WARMUP = 16, 4, 1


@dataclass(frozen=True)
class Contestant:
    """One line of the table. ``target`` is the least share of the plain loop's figure that it should reach."""

    name: str
    kind: str  # ours, plain, deepspeed, olmo
    ranks: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    target: float | None = None


OURS = [
    Contestant("trireme 1", "ours", 1, {}, 1.0),
    Contestant("trireme data=2", "ours", 2, {"data": 2}, 0.95),
    Contestant("trireme tensor=2 + sequence", "ours", 2, {"tensor": 2, "sequence_parallel": True}, 0.90),
    Contestant("trireme pipeline=2", "ours", 2, {"pipeline": 2, "balance": "cost"}, 1.0),
    Contestant("trireme data=2 ZeRO-3", "ours", 2, {"data": 2, "sharding": {"params": 2, "grads": 2, "optimizer": 2}}, 0.85),
]
PLAIN = Contestant("plain PyTorch loop", "plain")
PEERS = {
    "deepspeed": [Contestant(f"deepspeed data=2 ZeRO-{stage}", "deepspeed", 2, {"stage": stage}) for stage in (0, 1, 2, 3)],
    "olmo": [Contestant(f"olmo-core data=2 {way}", "olmo", 2, {"way": way}) for way in ("ddp", "fsdp")],
}
PACKAGES = {"deepspeed": ("deepspeed", "deepspeed"), "olmo": ("olmo_core", "ai2-olmo-core")}
"""What a peer imports, and its name on PyPI."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4, help="steps per round, the first left out")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--peers", nargs="*", default=[], choices=sorted(PEERS))
    parser.add_argument("--only", help="only contestants whose name contains this, and the plain loop")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(json.loads(arguments.worker))
    best = compete(contestants(arguments), arguments)
    print(json.dumps(best) if arguments.json else table(best))
    return 0


def contestants(arguments: argparse.Namespace) -> list[Contestant]:
    found = [PLAIN, *(c for c in OURS if not arguments.only or arguments.only in c.name)]
    for peer in arguments.peers:
        module, package = PACKAGES[peer]
        if importlib.util.find_spec(module) is None:
            print(f"{peer} is not installed: pip install {package}", file=sys.stderr)
        else:
            found += PEERS[peer]
    return found


def compete(entered: list[Contestant], arguments: argparse.Namespace) -> dict[str, dict[str, float | None]]:
    """The best of all rounds: tokens per CPU-second and per second, by name."""
    best: dict[str, dict[str, float | None]] = {}
    for round_number in range(arguments.rounds):
        for contestant in entered:
            print(f"round {round_number + 1}: {contestant.name}", file=sys.stderr)
            figures = measure(contestant, arguments.steps, arguments.precision)
            known = best.setdefault(contestant.name, {"target": contestant.target})
            for name, value in figures.items():
                known[name] = max(value, known.get(name) or 0.0)
    plain = best[PLAIN.name]["tokens_per_cpu_s"] or 1.0
    for figures in best.values():
        figures["ratio"] = (figures["tokens_per_cpu_s"] or 0.0) / plain
    return best


def measure(contestant: Contestant, steps: int, precision: str) -> dict[str, float]:
    """Start the ranks of a contestant, each in its own process; their best step together."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    order = json.dumps({"kind": contestant.kind, "settings": contestant.settings, "steps": steps, "precision": precision})
    meeting = {"WORLD_SIZE": str(contestant.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common = os.environ | meeting | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", order],
            stdout=subprocess.PIPE,
            text=True,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(contestant.ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{contestant.name} failed")
    ranks = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    tokens = GLOBAL_BATCH * MODEL["seq"]
    cpu = [sum(rank["cpu"][step] for rank in ranks) for step in range(WARMUP, steps)]
    wall = [max(rank["wall"][step] for rank in ranks) for step in range(WARMUP, steps)]
    return {"tokens_per_cpu_s": tokens / min(cpu), "tokens_per_s": tokens / min(wall)}


def table(best: dict[str, dict[str, float | None]]) -> str:
    lines = [f"{'':32}{'tok/CPU-s':>10}{'tok/s':>9}{'ratio':>8}{'target':>8}"]
    for name, figures in best.items():
        target = "" if figures["target"] is None else f"{figures['target']:.2f}"
        lines.append(f"{name:32}{figures['tokens_per_cpu_s']:10.0f}{figures['tokens_per_s']:9.0f}{figures['ratio']:8.2f}{target:>8}")
    return "\n".join(lines)


# what runs in each process


def work(order: dict[str, Any]) -> int:
    """Time every step of one rank; seconds of CPU and of the clock, as JSON on the last line."""
    import torch

    torch.set_num_threads(1)
    step = {"ours": ours, "plain": plain, "deepspeed": deepspeed, "olmo": olmo}[order["kind"]](order)
    cpu, wall = [], []
    for number in range(order["steps"]):
        start_cpu, start_wall = time.process_time(), time.perf_counter()
        step(number)
        cpu.append(time.process_time() - start_cpu)
        wall.append(time.perf_counter() - start_wall)
    print(json.dumps({"cpu": cpu, "wall": wall}), flush=True)
    return 0


def run_config(order: dict[str, Any]) -> Any:
    from trainer.config import TrainConfig, from_dict, resolve

    data = {
        "model": MODEL,
        "layout": {"micro_batch": MICRO_BATCH} | order["settings"],
        "data": {"kind": "synthetic"},
        "run": {"steps": order["steps"], "warmup_steps": WARMUP, "global_batch": GLOBAL_BATCH, "precision": order["precision"]},
    }
    return resolve(from_dict(TrainConfig, data), int(os.environ["WORLD_SIZE"]))


def ours(order: dict[str, Any]) -> Callable[[int], Any]:
    import torch

    from trainer.data import open_dataset
    from trainer.engine import Engine
    from trainer.parallel.collectives import World
    from trainer.place import discover

    config, place = run_config(order), discover(os.environ)
    world = World(place.rank, place.world_size, torch.device("cpu"), place.address, place.port, 300.0)
    engine = Engine(config, world, open_dataset(config.data, config.model, config.run.seed, config.run.global_batch))
    return engine.step


def plain(order: dict[str, Any]) -> Callable[[int], Any]:
    """What anybody would write: autograd, cross entropy over all logits, AdamW, clipping."""
    import torch
    import torch.nn.functional as F

    config, model, batch = plain_parts(order | {"settings": {}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    half = torch.autocast("cpu", torch.bfloat16, enabled=order["precision"] == "bf16")
    parts = config.run.global_batch // MICRO_BATCH

    def step(number: int) -> None:
        for micro_batch in range(parts):
            rows = batch(number, micro_batch * MICRO_BATCH, MICRO_BATCH)
            with half:
                logits = model(rows[:-1])
                loss = F.cross_entropy(logits.flatten(0, 1), rows[1:].flatten()) / parts
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def plain_parts(order: dict[str, Any]) -> tuple[Any, Any, Callable[[int, int, int], Any]]:
    """Configuration, the plain model with initial weights, and rows [s + 1, b] of a step."""
    import torch

    from trainer.data import open_dataset
    from trainer.models.layers import Part
    from trainer.models.transformer import Transformer

    config = run_config(order)
    model = Transformer(config.model)
    for part in model.modules():
        if isinstance(part, Part):
            for name, init in part.inits.items():
                torch.nn.init.normal_(getattr(part, name), init.value, init.std)
    dataset = open_dataset(config.data, config.model, config.run.seed, config.run.global_batch)
    return config, model, lambda step, start, count: torch.from_numpy(dataset.batch(step, start, count)).t().contiguous()


def deepspeed(order: dict[str, Any]) -> Callable[[int], Any]:
    """The same plain model under DeepSpeed's data parallelism."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as ds
    import torch.nn.functional as F

    ds.init_distributed(dist_backend="gloo")
    config, model, batch = plain_parts(order | {"settings": {"data": int(os.environ["WORLD_SIZE"])}})
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    parts = config.run.global_batch // MICRO_BATCH // world
    engine, *_ = ds.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_accumulation_steps": parts,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "zero_optimization": {"stage": order["settings"]["stage"], "overlap_comm": False},
        },
    )

    def step(number: int) -> None:
        for micro_batch in range(parts):
            rows = batch(number, (rank * parts + micro_batch) * MICRO_BATCH, MICRO_BATCH)
            loss = F.cross_entropy(engine(rows[:-1]).flatten(0, 1), rows[1:].flatten())
            engine.backward(loss)
            engine.step()

    return step


def olmo(order: dict[str, Any]) -> Callable[[int], Any]:
    """OLMo-core's own LLaMA of the same size under its data parallelism; its trainer is left out, which only keeps books."""
    from types import SimpleNamespace

    import torch
    from olmo_core.config import DType
    from olmo_core.distributed.parallel import DataParallelType
    from olmo_core.nn.transformer import TransformerConfig
    from olmo_core.optim import AdamWConfig
    from olmo_core.train.train_module import TransformerTrainModuleConfig
    from olmo_core.train.train_module.transformer.config import TransformerDataParallelConfig

    torch.distributed.init_process_group("gloo")
    config, _, batch = plain_parts(order | {"settings": {"data": 2}})
    network = TransformerConfig.llama_like(
        d_model=config.model.hidden, n_layers=config.model.layers, n_heads=config.model.heads, vocab_size=config.model.vocab
    )
    parallel = TransformerDataParallelConfig(name=DataParallelType(order["settings"]["way"]), param_dtype=None, reduce_dtype=DType.float32)
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=MICRO_BATCH * config.model.seq,
        max_sequence_length=config.model.seq,
        optim=AdamWConfig(lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95)),
        max_grad_norm=1.0,
        dp_config=parallel,
    ).build(network.build(init_device="meta"), device=torch.device("cpu"))
    module._trainer = SimpleNamespace(record_metric=lambda *_, **__: None, record_ce_loss=lambda *_, **__: None)
    rows_of_rank, rank = config.run.global_batch // 2, int(os.environ["RANK"])

    def step(number: int) -> None:
        tokens = batch(number, rank * rows_of_rank, rows_of_rank).t()[:, :-1].contiguous()
        module.zero_grads()
        module.train_batch({"input_ids": tokens})
        module.optim_step()

    return step


if __name__ == "__main__":
    sys.exit(main())
