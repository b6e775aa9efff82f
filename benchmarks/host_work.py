"""What a host spends on a block of other trainers, beside one of plain PyTorch modules on the same processor.

    python -m benchmarks.host_work [--megatron-deepspeed FOLDER] [--nanotron FOLDER] [--transformer-engine FOLDER]

Blocks that have next to nothing to compute: what is left of their time is the host's (Python, dispatch, autograd). Each is put over that of
plain modules measured before and after it, so that the processor's speed cancels; on a GPU a launch comes to every kernel of both. Printed
are the factors that conf/trainer has (``kernels.host_forward``, ``host_backward``), and for shards what gathering or reducing those of a
block takes, in launches of the plain one (``kernels.host_shards``; collectives go nowhere, in a group of PyTorch's kind ``fake``), and for
a mixture of experts what it takes beyond a dense block, in launches of the dense one (``kernels.launches_per_mixture``). A trainer whose
package is missing is left out, and named: transformers, megatron-core, a checkout of Megatron-DeepSpeed (BigScience) or of nanotron, or an
unpacked wheel of transformer_engine, whose compiled functions are stood in for (``benchmarks.transformer_engine``). Where there are tensor
ranks, they are eight, whose collectives go nowhere either.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import statistics
import sys
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.counts import configured, engine_of
from benchmarks.transformer_engine import TOKENS, install
from launcher.config.trainer import KernelProfile

LAYERS, HIDDEN, HEADS, SEQ = 8, 16, 2, 4
EXPERTS = (2, 8, 16)
ROUNDS = 5
OWN = "this project's trainer"
KERNELS = KernelProfile().launches_per_block
Compute = Callable[[], Tensor]
Times = tuple[float, float]


@dataclass
class _Measured:
    """What blocks run on, and how often. Kernels are so small that a device is done with each before the host has launched the next."""

    device: torch.device = torch.device("cpu")
    turns: int = 200

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


_on = _Measured()


class Block(nn.Module):
    """A transformer block as one writes it down, with scores in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])
        self.queries, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.register_buffer("mask", torch.triu(torch.ones(SEQ, SEQ, dtype=torch.bool), 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.queries(self.norms[0](x)).view(1, SEQ, 3, HEADS, HIDDEN // HEADS).permute(2, 0, 3, 1, 4)
        scores = ((q @ k.transpose(-1, -2)) * HEADS**-0.5).masked_fill(self.mask, -1e4).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(1, SEQ, HIDDEN))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def plain() -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(LAYERS)])


def of(module: nn.Module, batch_first: bool = True, *more: Any, tokens: int = SEQ) -> Compute:
    """``module`` applied to a few numbers, on the device that is measured."""
    shape = (1, tokens, HIDDEN) if batch_first else (tokens, 1, HIDDEN)
    given = [each.to(_on.device) if isinstance(each, Tensor) else each for each in more]
    return partial(module.to(_on.device), torch.randn(shape, device=_on.device, requires_grad=True), *given)


def timed(compute: Compute) -> Times:
    """Median seconds of a block: forward, backward."""
    ways: tuple[list[float], list[float]] = ([], [])
    for turn in range(_on.turns):
        _on.finish()
        start = time.perf_counter()
        out = compute()
        middle = time.perf_counter()
        out.sum().backward()
        if turn >= _on.turns // 10:
            ways[0].append(middle - start)
            ways[1].append(time.perf_counter() - middle)
    return statistics.median(ways[0]) / LAYERS, statistics.median(ways[1]) / LAYERS


def compared(compute: Compute) -> tuple[Times, Times]:
    """Times of ``compute`` and of plain blocks, in turns, the least of each: what disturbs a host only adds."""
    ours, base = [], []
    for _ in range(ROUNDS):
        base.append(timed(of(plain())))
        ours.append(timed(compute))
    least = [tuple(map(min, zip(*found))) for found in (ours, base)]
    return (least[0][0], least[0][1]), (least[1][0], least[1][1])


def compiled() -> Compute:
    blocks: list[Any] = [torch.compile(block) for block in plain()]
    return of(nn.Sequential(*blocks))


def own() -> float:
    """Seconds of a block of this project's trainer, both ways: its step has them together, so of ``LAYERS`` blocks more."""
    shape = {"hidden": HIDDEN, "heads": HEADS, "vocab": 64, "seq": SEQ}
    kind = _on.device.type
    engines = [
        engine_of(configured(shape | {"layers": layers}, global_batch=1, device=kind), str(_on.device)) for layers in (2, 2 + LAYERS)
    ]
    small, large = (_median(partial(each.gradients, each.batches.read(0))) for each in engines)
    return (large - small) / LAYERS


def _median(compute: Callable[[], Any]) -> float:
    times = []
    for _ in range(_on.turns):
        _on.finish()
        start = time.perf_counter()
        compute()
        times.append(time.perf_counter() - start)
    return statistics.median(times[_on.turns // 10 :])


class Hidden(nn.Module):
    """A model of transformers, from its first hidden state to its last."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(inputs_embeds=x, use_cache=False).last_hidden_state
        return out


def huggingface(name: str) -> Compute:
    transformers = importlib.import_module("transformers")
    shape = {
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "vocab_size": 64,
        "attn_implementation": "eager",
    }
    if name == "gpt2":
        off = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        return of(Hidden(transformers.GPT2Model(transformers.GPT2Config(**shape, **off))))
    return of(Hidden(transformers.LlamaModel(transformers.LlamaConfig(**shape, intermediate_size=4 * HIDDEN))))


def megatron_core() -> Compute:
    """Its transformer block of modules without Transformer Engine, which needs a GPU."""
    specs, block = _core()
    return of(block(specs.get_gpt_layer_local_spec()), False, torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), 1))


def with_transformer_engine(experts: int | None = None, recipe: str = "", llama: bool = False) -> Compute:
    """Its transformer block of Transformer Engine's modules: a dense one, or a mixture whose ``experts`` one rank has, two for each token;
    products in 8 bits by a ``recipe`` for their scales."""
    more: dict[str, Any] = {"fp8": "hybrid", "fp8_recipe": recipe} if recipe else {}
    if llama or experts:
        more |= {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False, "normalization": "RMSNorm"}
    if experts:
        more |= {"num_moe_experts": experts, "moe_grouped_gemm": True, "moe_aux_loss_coeff": 1e-3, "moe_token_dispatcher_type": "alltoall"}
    specs, block = _core(**more)
    spec = specs.get_gpt_layer_with_transformer_engine_spec(num_experts=experts, moe_grouped_gemm=experts is not None)
    return of(block(spec), False, None, tokens=TOKENS)


def _core(**more: Any) -> tuple[Any, Callable[[Any], nn.Module]]:
    """Megatron Core's descriptions of blocks, and what makes one of them."""
    from_core = partial(importlib.import_module, package="megatron.core")
    state, specs = from_core(".parallel_state"), from_core(".models.gpt.gpt_layer_specs")
    config_of, block_of = from_core(".transformer.transformer_config"), from_core(".transformer.transformer_block")
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel(1, 1, create_gloo_process_groups=False)
    _without_random_states("megatron")
    config = config_of.TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=True,
        masked_softmax_fusion=False,
        **{name: value for name, value in more.items() if not name.startswith("fp8")},
    )
    for name in ("fp8", "fp8_recipe"):  # its checks ask the device for 8 bits
        if name in more:
            setattr(config, name, more[name])
    return specs, lambda spec: block_of.TransformerBlock(config, spec, post_layer_norm=False)


class _NoRandomStates:
    """A device's random states are not those of a host."""

    def fork(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_initialized(self) -> bool:
        return False


def _without_random_states(package: str) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith(package) and hasattr(module, "get_cuda_rng_tracker"):
            vars(module)["get_cuda_rng_tracker"] = _NoRandomStates


class _Unused:
    """Whatever is asked of it, of what a layer imports and does not use."""

    def __getattr__(self, _: str) -> _Unused:
        return _Unused()

    def __call__(self, *_: Any, **__: Any) -> _Unused:
        return _Unused()


class _Arguments(types.SimpleNamespace):
    """Options that are not set are None."""

    def __getattr__(self, _: str) -> None:
        return None


def megatron_deepspeed(folder: Path) -> Compute:
    """Layers of ``megatron/model/transformer.py``, imported without the programs around them; norms are PyTorch's."""
    _forget("megatron")
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.activation_checkpointing", "deepspeed.accelerator"):
        _stand_in(name, "", checkpointing=types.SimpleNamespace(is_configured=lambda: False))
    _stand_in("deepspeed.runtime.activation_checkpointing.checkpointing", "", is_configured=lambda: False)
    arguments = _Arguments(
        hidden_size=HIDDEN,
        ffn_hidden_size=4 * HIDDEN,
        num_attention_heads=HEADS,
        kv_channels=HIDDEN // HEADS,
        num_layers=LAYERS,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        layernorm_epsilon=1e-5,
        bias_dropout_fusion=True,
        bias_gelu_fusion=True,
    )
    logging.get_logger = logging.getLogger  # type: ignore[attr-defined]
    root = _stand_in("megatron", str(folder / "megatron"), get_args=lambda: arguments, logging=logging)
    _stand_in("megatron.model", str(folder / "megatron" / "model"))
    _stand_in("megatron.model.fused_layer_norm", "", MixedFusedLayerNorm=nn.LayerNorm)
    root.mpu = mpu = importlib.import_module("megatron.mpu")  # type: ignore[attr-defined]
    mpu.initialize_model_parallel(1, 1)
    transformer = importlib.import_module("megatron.model.transformer")
    _without_random_states("megatron")
    drawn = partial(nn.init.normal_, std=0.02)
    layers = nn.ModuleList([transformer.ParallelTransformerLayer(drawn, drawn, i) for i in range(LAYERS)])
    return of(_InTurn(layers), False, torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), 1))


def nanotron(folder: Path, ranks: int) -> Compute:
    """Layers of ``models/llama.py`` on one of so many tensor ranks, which share sequences out, without the programs around them. An
    operation of PyTorch stands in for each compiled one: rotation, attention, norms."""
    _forget("nanotron")
    source = folder / "src" / "nanotron"
    _stand_in("nanotron", str(source))
    for name in ("generation", "models", "nn", "parallel", "parallel.tensor_parallel"):
        _stand_in(f"nanotron.{name}", str(source.joinpath(*name.split("."))), NanotronModel=nn.Module)
    for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.layers", "config", "config.models_config", "nn.activations"):
        _stand_in(name if name.startswith("flash") else f"nanotron.{name}", "", ACT2FN={"silu": F.silu})
    for name in ("parallel.pipeline_parallel", "parallel.pipeline_parallel.block", "parallel.pipeline_parallel.p2p"):
        _stand_in(f"nanotron.{name}", "", TensorPointer=_Unused)
    for name in ("random", "scaling", "scaling.parametrization"):
        _stand_in(f"nanotron.{name}", "")
    _stand_in("flash_attn.layers.rotary", "", RotaryEmbedding=_Rotated)
    _stand_in("flash_attn.flash_attn_interface", "", flash_attn_varlen_func=lambda q, k, v, **_: q + k.view_as(q) * v.view_as(q))
    _stand_in("nanotron.logging", "", get_logger=logging.getLogger)
    _stand_in("nanotron.nn.layer_norm", "", TritonRMSNorm=nn.RMSNorm)
    importlib.import_module("nanotron.distributed")  # before others look for it in the package
    mode = importlib.import_module("nanotron.parallel.tensor_parallel.enum").TensorParallelLinearMode.REDUCE_SCATTER
    llama = importlib.import_module("nanotron.models.llama")
    vars(llama)["LlamaRotaryEmbedding"] = _Rotated  # for generation only, and on a GPU
    heads = max(ranks, HEADS)
    shape = types.SimpleNamespace(hidden_size=HIDDEN, num_attention_heads=heads, num_key_value_heads=heads, intermediate_size=4 * HIDDEN)
    vars(shape).update(hidden_act="silu", rms_norm_eps=1e-5, rope_interleaved=False, rope_theta=1e4, is_using_mup=False)
    vars(shape).update(max_position_embeddings=SEQ, num_hidden_layers=LAYERS)
    spread = types.SimpleNamespace(tp_mode=mode, tp_linear_async_communication=True, tp_recompute_allgather=True, recompute_layer=False)
    group = dist.new_group(list(range(ranks)), backend="fake")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # it insists
    with _on.device:
        layers = nn.ModuleList([llama.LlamaDecoderLayer(shape, spread, group, i) for i in range(LAYERS)])
    return of(_Paired(layers), False, torch.ones(1, SEQ * ranks, dtype=torch.bool))


class _Rotated(nn.Module):
    """A rotation of queries and keys as one operation each."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, queries: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        return queries * 1.0, kv * 1.0


class _Paired(nn.Module):
    """Layers that hand their mask on."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x, mask = layer._core_forward(x, mask)  # type: ignore[operator]
        return x


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]


class _InTurn(nn.Module):
    """Layers that are given a mask."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


def _stand_in(name: str, folder: str, **known: Any) -> types.ModuleType:
    """A module of that name, with submodules in ``folder``, in which every name is known."""
    module = types.ModuleType(name)
    module.__path__ = [folder] if folder else []
    module.__getattr__ = _any  # type: ignore[method-assign]
    module.__dict__.update(known)
    sys.modules[name] = module
    return module


def _any(name: str) -> _Unused:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Unused()


def sharded(version: int) -> Compute:
    """Blocks whose parameters are sharded over eight ranks."""
    blocks = plain()
    if version == 1:
        fsdp = importlib.import_module("torch.distributed.fsdp")
        policy = importlib.import_module("torch.distributed.fsdp.wrap").ModuleWrapPolicy({Block})
        return of(fsdp.FullyShardedDataParallel(blocks, auto_wrap_policy=policy, device_id=_on.device))
    fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
    mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh(_on.device.type, (dist.get_world_size(),))
    for module in (*blocks, blocks):
        fully_shard(module, mesh=mesh)
    return of(blocks)


def shown(name: str, make: Callable[[], Compute]) -> None:
    """Print one line."""
    try:
        compute = make()
    except ImportError as missing:
        print(f"{name:40s} left out: {missing}", flush=True)
        return
    (forward, backward), base = compared(compute)
    line = f"{name:40s} {1e6 * forward:6.0f} {1e6 * backward:6.0f} us {forward / base[0]:15.1f} {backward / base[1]:5.1f}"
    if name.startswith("FSDP"):  # forward gathers, backward gathers and reduces
        more = (forward - base[0]) / (base[0] / KERNELS) + (backward - base[1]) / (base[1] / KERNELS / 2)
        line += f"   {more / 3:.0f} launches to gather or reduce a block's shards"
    print(line, flush=True)


def engine_shown(folder: Path) -> None:
    """Print the lines of Transformer Engine's modules. Without a GPU ``torch.cuda`` is stood in for from here on."""
    name = "Megatron Core with Transformer Engine"
    _forget("megatron")
    try:
        install(folder, _on.device)
        importlib.import_module("megatron.core")
    except ImportError as missing:
        print(f"{name:40s} left out: {missing}", flush=True)
        return
    shown(name, with_transformer_engine)
    for recipe, scaling in (("delayed", "delayed"), ("tensorwise", "current")):
        shown(f"  in 8 bits, {scaling} scaling", partial(with_transformer_engine, recipe=recipe))
    for recipe in ("", "delayed"):
        plain, dense = (sum(_both(partial(with_transformer_engine, recipe=recipe, llama=llama))) for llama in (False, True))
        for experts in EXPERTS:
            more = sum(_both(partial(with_transformer_engine, experts, recipe))) - dense
            bits = "8 bits" if recipe else "16 bits"
            print(f"  mixture in {bits}, {experts} experts of a rank{'':12s} {KERNELS * more / plain:.0f} further launches", flush=True)


def _both(make: Callable[[], Compute]) -> Times:
    """Times of a block, as often as those that are put over plain ones."""
    compute = make()
    forward, backward = map(min, zip(*(timed(compute) for _ in range(ROUNDS))))
    return forward, backward


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megatron-deepspeed", metavar="FOLDER", type=Path, help="a checkout")
    parser.add_argument("--nanotron", metavar="FOLDER", type=Path, help="a checkout")
    parser.add_argument("--transformer-engine", metavar="FOLDER", type=Path, help="a wheel of transformer_engine, unpacked")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="with a GPU what launching kernels takes is measured too")
    parser.add_argument("--turns", type=int, default=_on.turns, help="that a time is the median of")
    given = parser.parse_args()
    if given.transformer_engine and not (given.transformer_engine / "transformer_engine" / "pytorch").is_dir():
        parser.error(f"--transformer-engine={given.transformer_engine} has no transformer_engine/pytorch; unpack its wheel there")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    _on.turns = given.turns
    if given.device == "cuda":
        _on.device = torch.device("cuda", 0)
    else:
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    print(f"{'block of':40s} forward, backward     over plain modules")
    shown("plain PyTorch", lambda: of(plain()))
    shown("plain PyTorch, compiled", compiled)
    both, base = min(own() for _ in range(ROUNDS)), sum(_both(lambda: of(plain())))
    print(f"{OWN:40s} {1e6 * both:6.0f} us both ways {both / base:16.1f} both ways", flush=True)
    shown("transformers, GPT-2", lambda: huggingface("gpt2"))
    shown("transformers, LLaMA", lambda: huggingface("llama"))
    shown("FSDP of plain PyTorch (fully_shard)", lambda: sharded(2))
    shown("FSDP 1 of plain PyTorch", lambda: sharded(1))
    shown("Megatron Core", megatron_core)
    if given.megatron_deepspeed:
        shown("Megatron-DeepSpeed", lambda: megatron_deepspeed(given.megatron_deepspeed))
    if given.nanotron:
        for ranks in (1, dist.get_world_size()):
            shown(f"nanotron, {ranks} tensor rank{'s' * (ranks > 1)}", partial(nanotron, given.nanotron, ranks))
    if given.transformer_engine:
        engine_shown(given.transformer_engine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
