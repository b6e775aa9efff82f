"""Side by side, in one run: this trainer under several layouts and what a user would pick instead.

    python benchmarks/trainer.py                       # CPU: tokens per CPU-second, summed over ranks
    python benchmarks/trainer.py --model cpu_small        # where less is computed per message and per call
    python benchmarks/trainer.py --model cpu_moe          # a mixture of experts; cpu_long: long sequences, context ranks
    python benchmarks/trainer.py --peers deepspeed olmo   # adds peers, if they are installed
    python benchmarks/trainer.py --device cuda            # GPUs, one per rank, bf16: tokens per second and MFU
    python benchmarks/trainer.py --device cuda --model 1.3B --peers nanogpt --nanogpt FOLDER    # beside a checkout of nanoGPT

On CPU the model has 4 layers, hidden 256, sequence 256, vocabulary 50304, micro-batch 4, 4096 tokens a step,
untied, fp32, AdamW with clipping, one thread per rank (``cpu_small``: vocabulary 4096, no targets); on GPU it is GPT-3 126M with
sequences of 2048 or another (``--model``), and contestants that need more GPUs than there are stay out. The plain loop is the same
model, from ``trainer.models``, with torch's own loss and optimizer. Each contestant runs in fresh processes; the first steps are left
out. On a CPU the best step counts, because on a shared machine the others say how busy the neighbours are; a GPU is given all steps at
once, as in training, and their mean counts. Rounds alternate between contestants for the same reason. Figures are printed as they come.
"""

from __future__ import annotations

import argparse
import gc
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

MODELS: dict[str, dict[str, Any]] = {
    "cpu": {"family": "gpt", "layers": 4, "hidden": 256, "heads": 4, "vocab": 50304, "seq": 256, "tied": False},
    "cpu_small": {"family": "gpt", "layers": 4, "hidden": 256, "heads": 4, "vocab": 4096, "seq": 256, "tied": False},
    "cpu_moe": {
        "family": "llama",
        "layers": 4,
        "hidden": 256,
        "heads": 4,
        "vocab": 4096,
        "seq": 256,
        "tied": False,
        "experts": {"count": 8, "active": 2, "ffn": 512},
    },
    "cpu_long": {"family": "llama", "layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "vocab": 4096, "seq": 4096, "tied": False},
    "126M": {"family": "gpt", "layers": 12, "hidden": 768, "heads": 12, "vocab": 50304, "seq": 2048, "tied": False},
    "124M": {"family": "gpt", "layers": 12, "hidden": 768, "heads": 12, "vocab": 50304, "seq": 1024, "tied": True},
    "1.3B": {"family": "gpt", "layers": 24, "hidden": 2048, "heads": 16, "vocab": 50304, "seq": 2048, "tied": True},
}
BATCHES = {"cpu": (16, 4), "cpu_small": (16, 4), "cpu_moe": (16, 4), "cpu_long": (2, 1), "126M": (64, 8), "124M": (32, 16), "1.3B": (8, 4)}
"""Sequences of a step and of a micro-batch."""
WARMUP = {"cpu": 1, "cuda": 3}
"""First steps left out; on GPU blocks are compiled in them."""


@dataclass(frozen=True)
class Contestant:
    """One line of the table. ``target`` is the least share of the plain loop's figure that it should reach."""

    name: str
    kind: str  # ours, plain, nanogpt, deepspeed, olmo
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
OURS_FOR = {
    "cpu_moe": [
        Contestant("trireme 1", "ours", 1, {}, 1.0),
        Contestant("trireme data=2", "ours", 2, {"data": 2}),
        Contestant("trireme data=2 expert=2", "ours", 2, {"data": 2, "expert": 2}),
        Contestant("trireme tensor=2 expert=2", "ours", 2, {"tensor": 2, "expert": 2}),
    ],
    "cpu_long": [
        Contestant("trireme 1", "ours", 1, {}, 1.0),
        Contestant("trireme data=2", "ours", 2, {"data": 2}),
        Contestant("trireme context=2", "ours", 2, {"context": 2}),
        Contestant("trireme tensor=2 + sequence", "ours", 2, {"tensor": 2, "sequence_parallel": True}),
    ],
}
"""In place of those, for models that have another question."""
PLAIN = Contestant("plain PyTorch loop", "plain")
PEERS = {
    "nanogpt": [Contestant("nanoGPT, compiled", "nanogpt")],
    "deepspeed": [Contestant(f"deepspeed data=2 ZeRO-{stage}", "deepspeed", 2, {"stage": stage}) for stage in (0, 1, 2, 3)],
    "olmo": [Contestant(f"olmo-core data=2 {way}", "olmo", 2, {"way": way}) for way in ("ddp", "fsdp")],
}
PACKAGES = {"deepspeed": ("deepspeed", "deepspeed"), "olmo": ("olmo_core", "ai2-olmo-core")}
"""What a peer imports, and its name on PyPI."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", choices=list(MODELS), help="default: cpu, or 126M on GPU")
    parser.add_argument("--steps", type=int, default=3, help="measured steps per round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="default: fp32 on CPU, bf16 on GPU")
    parser.add_argument(
        "--peak-tflops", type=float, help="of one GPU at this precision, for MFU (default: by its name, from conf/hardware)"
    )
    parser.add_argument("--peers", nargs="*", default=[], choices=sorted(PEERS))
    parser.add_argument("--nanogpt", metavar="FOLDER", type=Path, help="a checkout of nanoGPT, for --peers nanogpt")
    parser.add_argument("--only", help="only contestants whose name contains this, and the plain loop")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(json.loads(arguments.worker))
    arguments.model = arguments.model or {"cpu": "cpu", "cuda": "126M"}[arguments.device]
    if "nanogpt" in arguments.peers and not (arguments.nanogpt and (arguments.nanogpt / "model.py").is_file()):
        parser.error("--peers nanogpt needs --nanogpt=FOLDER with its model.py")
    arguments.precision = arguments.precision or {"cpu": "fp32", "cuda": "bf16"}[arguments.device]
    entered = contestants(arguments)
    if arguments.device == "cuda":
        entered = for_gpus(entered, arguments)
    best = compete(entered, arguments)
    print(json.dumps(best) if arguments.json else table(best))
    return 0


def for_gpus(entered: list[Contestant], arguments: argparse.Namespace) -> list[Contestant]:
    """Those that the GPUs of this machine suffice for; fills in the peak rate."""
    import torch

    count = torch.cuda.device_count()
    if not count:
        raise SystemExit("--device cuda: torch sees no GPU here")
    if arguments.peak_tflops is None:
        arguments.peak_tflops = peak_tflops(torch.cuda.get_device_name(0), arguments.precision)
    for contestant in entered:
        if contestant.ranks > count:
            print(f"{contestant.name} needs {contestant.ranks} GPUs, {count} here", file=sys.stderr)
    return [contestant for contestant in entered if contestant.ranks <= count]


def peak_tflops(device: str, precision: str) -> float | None:
    """The dense peak of a GPU that a hardware file is named after, as in "NVIDIA H200" and h200; None for others."""
    from launcher.config.hardware import hardware_files

    words = device.lower().replace("-", " ").split()
    found = [each for name, each in hardware_files().items() if name.split("_")[0] in words]
    return found[0].peak_tflops.get(precision) if found else None


def contestants(arguments: argparse.Namespace) -> list[Contestant]:
    found = [PLAIN, *(c for c in OURS_FOR.get(arguments.model, OURS) if not arguments.only or arguments.only in c.name)]
    for peer in arguments.peers:
        module, package = PACKAGES.get(peer, ("", ""))
        if module and importlib.util.find_spec(module) is None:
            print(f"{peer} is not installed: pip install {package}", file=sys.stderr)
        else:
            found += PEERS[peer]
    return found


def compete(entered: list[Contestant], arguments: argparse.Namespace) -> dict[str, dict[str, float | None]]:
    """The best of all rounds: tokens per CPU-second and per second, by name."""
    best: dict[str, dict[str, float | None]] = {}
    for round_number in range(arguments.rounds):
        for contestant in entered:
            figures = measure(contestant, arguments)
            shown = "".join(f"  {value:.4g} {COLUMNS[name]}" for name, value in figures.items())
            print(f"round {round_number + 1}: {contestant.name}{shown}", file=sys.stderr, flush=True)
            target = None if arguments.model == "cpu_small" else contestant.target
            known = best.setdefault(contestant.name, {"target": target})
            for name, value in figures.items():
                known[name] = max(value, known.get(name) or 0.0)
    unit = "tokens_per_cpu_s" if arguments.device == "cpu" else "tokens_per_gpu_s"
    plain = best[PLAIN.name][unit] or 1.0
    for known in best.values():
        known["ratio"] = (known[unit] or 0.0) / plain
    return best


def measure(contestant: Contestant, arguments: argparse.Namespace) -> dict[str, float]:
    """Start the ranks of a contestant, each in its own process; their best step together."""
    device = arguments.device
    steps = WARMUP[device] + arguments.steps
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    order = json.dumps(
        {"kind": contestant.kind, "settings": contestant.settings, "steps": steps, "precision": arguments.precision, "device": device}
        | {"model": arguments.model, "nanogpt": str(arguments.nanogpt)}
    )
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
    tokens = BATCHES[arguments.model][0] * int(MODELS[arguments.model]["seq"])
    cpu = min(map(sum, zip(*(rank["cpu"] for rank in ranks))))
    wall = min(map(max, zip(*(rank["wall"] for rank in ranks))))
    if device == "cpu":
        return {"tokens_per_cpu_s": tokens / cpu, "tokens_per_s": tokens / wall}
    rates = {"tokens_per_gpu_s": tokens / wall / contestant.ranks, "tokens_per_s": tokens / wall}
    tflops = flops_per_step(arguments.model) / wall / contestant.ranks / 1e12
    return rates | ({"mfu": tflops / arguments.peak_tflops} if arguments.peak_tflops else {})


def flops_per_step(model: str) -> float:
    """Model FLOPs of a step on GPU, as ``trainer.shared.run.flops`` counts them."""
    from trainer.shared.run.derived import resolve_model
    from trainer.shared.run.flops import model_flops
    from trainer.shared.run.read import from_dict
    from trainer.shared.run.schema import ModelConfig

    return model_flops(resolve_model(from_dict(ModelConfig, MODELS[model])), BATCHES[model][0])


COLUMNS = {
    "tokens_per_cpu_s": "tok/CPU-s",
    "tokens_per_gpu_s": "tok/GPU-s",
    "tokens_per_s": "tok/s",
    "mfu": "MFU",
    "ratio": "ratio",
    "target": "target",
}


def table(best: dict[str, dict[str, float | None]]) -> str:
    shown = [name for name in COLUMNS if any(name in figures for figures in best.values())]
    lines = [" " * 32 + "".join(f"{COLUMNS[name]:>11}" for name in shown)]
    for contestant, figures in best.items():
        cells = [figures.get(name) for name in shown]
        lines.append(f"{contestant:32}" + "".join(" " * 11 if c is None else f"{c:11.2f}" if c < 10 else f"{c:11.0f}" for c in cells))
    return "\n".join(lines)


# what runs in each process

BACKEND = {"cpu": "gloo", "cuda": "nccl"}


def work(order: dict[str, Any]) -> int:
    """Time the steps of one rank after the first; seconds of CPU and of the clock, as JSON on the last line."""
    import torch

    torch.set_num_threads(1)
    device = device_of(order)
    step = {"ours": ours, "plain": plain, "nanogpt": nanogpt, "deepspeed": deepspeed, "olmo": olmo}[order["kind"]](order)
    warmup = WARMUP[order["device"]]
    for number in range(warmup):
        step(number)
    at_once = order["steps"] - warmup if device.type == "cuda" else 1
    cpu, wall = [], []
    for first in range(warmup, order["steps"], at_once):
        synchronize(device)
        start_cpu, start_wall = time.process_time(), time.perf_counter()
        for number in range(first, first + at_once):
            step(number)
        synchronize(device)
        cpu.append((time.process_time() - start_cpu) / at_once)
        wall.append((time.perf_counter() - start_wall) / at_once)
    print(json.dumps({"cpu": cpu, "wall": wall}), flush=True)
    return 0


def synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def device_of(order: dict[str, Any]) -> Any:
    from trainer.loop import choose_device

    return choose_device(order["device"], int(os.environ["LOCAL_RANK"]))


def run_config(order: dict[str, Any]) -> Any:
    from trainer.shared.run.read import from_dict
    from trainer.shared.run.rules import resolve
    from trainer.shared.run.schema import TrainConfig

    device, model = order["device"], order["model"]
    global_batch, micro_batch = BATCHES[model]
    data = {
        "model": MODELS[model],
        "layout": {"micro_batch": micro_batch} | order["settings"],
        "data": {"kind": "synthetic"},
        "run": {"steps": order["steps"], "warmup_steps": WARMUP[device], "global_batch": global_batch, "precision": order["precision"]},
    }
    return resolve(from_dict(TrainConfig, data), int(os.environ["WORLD_SIZE"]))


def ours(order: dict[str, Any]) -> Callable[[int], Any]:
    from trainer.comm.collectives import World
    from trainer.data import open_dataset
    from trainer.launch.rank_env import discover
    from trainer.step import Engine

    config, place = run_config(order), discover(os.environ)
    world = World(place.rank, place.world_size, device_of(order), place.address, place.port, 300.0)
    engine = Engine(config, world, open_dataset(config.data, config.model, config.run.seed))
    gc.disable()  # between steps, as in trainer.loop
    queued: list[Any] = []

    def step(number: int) -> None:
        queued.append(engine.queue(number))
        if len(queued) > engine.reads_late:  # as trainer.loop does
            engine.read(queued.pop(0))

    return step


def plain(order: dict[str, Any]) -> Callable[[int], Any]:
    """What anybody would write: autograd, cross entropy over all logits, AdamW, clipping; on GPU torch.compile."""
    import torch
    import torch.nn.functional as F

    config, model, batch = plain_parts(order | {"settings": {}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    if order["device"] == "cuda":
        model = torch.compile(model)
    half = torch.autocast(order["device"], torch.bfloat16, enabled=order["precision"] == "bf16")
    size = BATCHES[order["model"]][1]
    parts = config.run.global_batch // size

    def step(number: int) -> None:
        for micro_batch in range(parts):
            rows = batch(number, micro_batch * size, size)
            with half:
                logits = model(rows[:-1])
                loss = F.cross_entropy(logits.flatten(0, 1), rows[1:].flatten()) / parts
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def nanogpt(order: dict[str, Any]) -> Callable[[int], Any]:
    """nanoGPT's model and optimizer, compiled, with the steps of its ``train.py``."""
    import torch

    sys.path.insert(0, order["nanogpt"])
    from model import GPT, GPTConfig

    config, device = run_config(order), device_of(order)
    shape, size = config.model, BATCHES[order["model"]][1]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    sizes = {"block_size": shape.seq, "vocab_size": shape.vocab, "n_layer": shape.layers, "n_head": shape.heads, "n_embd": shape.hidden}
    network = GPT(GPTConfig(**sizes, dropout=0.0, bias=True)).to(device)
    optimizer = network.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.type)
    compiled, dataset = torch.compile(network), plain_dataset(config)
    half = torch.autocast(device.type, torch.bfloat16, enabled=order["precision"] == "bf16")
    parts = config.run.global_batch // size

    def step(number: int) -> None:
        for micro_batch in range(parts):
            rows = torch.from_numpy(dataset.batch(number * config.run.global_batch + micro_batch * size, size))
            if device.type == "cuda":
                rows = rows.pin_memory().to(device, non_blocking=True)
            with half:
                _, loss = compiled(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
            (loss / parts).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def plain_dataset(config: Any) -> Any:
    from trainer.data import open_dataset

    return open_dataset(config.data, config.model, config.run.seed)


def plain_parts(order: dict[str, Any]) -> tuple[Any, Any, Callable[[int, int, int], Any]]:
    """Configuration, the plain model with initial weights, and rows [s + 1, b] of a step."""
    import torch

    from trainer.models.layers import ParameterModule
    from trainer.models.transformer import Transformer

    config = run_config(order)
    device = device_of(order)
    model = Transformer(config.model).to(device)
    for part in model.modules():
        if isinstance(part, ParameterModule):
            for name, spec in part.specs.items():
                torch.nn.init.normal_(getattr(part, name), spec.init.value, spec.init.std)
    dataset = plain_dataset(config)

    def rows(step: int, start: int, count: int) -> Any:
        first = step * config.run.global_batch + start
        return torch.from_numpy(dataset.batch(first, count)).t().contiguous().to(device)

    return config, model, rows


def deepspeed(order: dict[str, Any]) -> Callable[[int], Any]:
    """The same plain model under DeepSpeed's data parallelism."""
    os.environ["DS_ACCELERATOR"] = order["device"]
    import deepspeed as ds
    import torch.nn.functional as F

    ds.init_distributed(dist_backend=BACKEND[order["device"]])
    size = BATCHES[order["model"]][1]
    config, model, batch = plain_parts(order | {"settings": {"data": int(os.environ["WORLD_SIZE"])}})
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    parts = config.run.global_batch // size // world
    engine, *_ = ds.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": size,
            "bf16": {"enabled": order["precision"] == "bf16"},
            "gradient_accumulation_steps": parts,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "zero_optimization": {"stage": order["settings"]["stage"], "overlap_comm": False},
        },
    )

    def step(number: int) -> None:
        for micro_batch in range(parts):
            rows = batch(number, (rank * parts + micro_batch) * size, size)
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

    torch.distributed.init_process_group(BACKEND[order["device"]])
    config, _, batch = plain_parts(order | {"settings": {"data": 2}})
    network = TransformerConfig.llama_like(
        d_model=config.model.hidden, n_layers=config.model.layers, n_heads=config.model.heads, vocab_size=config.model.vocab
    )
    parameters = DType.bfloat16 if order["precision"] == "bf16" else None
    parallel = TransformerDataParallelConfig(
        name=DataParallelType(order["settings"]["way"]), param_dtype=parameters, reduce_dtype=DType.float32
    )
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=BATCHES[order["model"]][1] * config.model.seq,
        max_sequence_length=config.model.seq,
        optim=AdamWConfig(lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95)),
        max_grad_norm=1.0,
        dp_config=parallel,
    ).build(network.build(init_device="meta"), device=device_of(order))
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
