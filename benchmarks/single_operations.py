"""Single operations on one GPU, timed alone: what the constants of the cost model say of kernels, held against kernels.

    python -m benchmarks.single_operations measure OPERATIONS.csv   on a machine with a GPU, about two minutes
    python -m benchmarks.single_operations read OPERATIONS.csv      what follows for the constants, anywhere

Every operation is launched many times in a row while the device sleeps, so that no host is waited for, on several sets of operands in turn,
so that none is found in the cache; the time is the median of three such rows. Operands are random normal numbers: zeros draw less power,
and products of them run faster.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import host_work
from benchmarks.host_work import KERNELS
from launcher.config.constants import constant_entries
from launcher.config.hardware import hardware_files
from launcher.cost.inputs.constants import SHIPPED
from launcher.cost.inputs.device import Device
from launcher.cost.time import matmul
from launcher.cost.time.attention import DROPOUT_PASSES
from launcher.cost.time.pointwise import PASSES

FIELDS = ("operation", "precision", "a", "b", "c", "d", "seconds")
CACHE = 2**28
"""Bytes: sets of operands are taken in turn that hold as much, several times what a second-level cache does."""
ROW_S = 8e-3
ROUNDS = 3
Row = dict[str, Any]

BLOCKS = [(1024, 1), (2048, 1), (2048, 2), (4096, 1), (4096, 4), (5120, 2), (6144, 4), (8192, 4), (8192, 8), (12288, 8), (20480, 8)]
"""Hidden sizes, and tensor ranks that divide them."""
ODD = [
    (4096, 1800, 14400), (4096, 14400, 1800), (4096, 1792, 14336), (4096, 14336, 1792), (4096, 2040, 8192), (4096, 8192, 2040),
    (4096, 2048, 8192), (4096, 8192, 2048), (8192, 3400, 6800), (8192, 3392, 6784), (8192, 6800, 3400), (8192, 6784, 3392),
    (4096, 5160, 5160), (4096, 5152, 5152), (4096, 5120, 5120), (4096, 5136, 5136), (2048, 1360, 10880), (2048, 1344, 10880),
    (4096, 4104, 4104), (4096, 4112, 4112), (4096, 4128, 4128), (4096, 4160, 4160), (4096, 50257, 2048), (4096, 50304, 2048),
]  # fmt: skip
"""Rows, columns and inner sizes of products, of which some begin rows between lines of 128 bytes."""


def shapes() -> list[tuple[int, int, int]]:
    """Rows, columns and inner sizes."""
    found = [(8192, 8192, k) for k in (64, 128, 256, 512, 1024, 2048, 4096, 8192)]
    found += [(m, 4096, 4096) for m in range(512, 8193, 512)]
    found += [(m, n, k) for m, n, k in itertools.product((512, 1024, 2048, 4096), (512, 1024, 3072, 4096), (1024, 2048, 4096))]
    for hidden, ranks in BLOCKS:
        for tokens in (2048, 8192):
            found += [(tokens, 3 * hidden // ranks, hidden), (tokens, hidden, hidden // ranks)]
            found += [(tokens, 4 * hidden // ranks, hidden), (tokens, hidden, 4 * hidden // ranks)]
    return list(dict.fromkeys(found + ODD))


TOKENS = 16384
"""Of attention."""
SIZES = ((8192, 2048), (8192, 8192))
"""Rows and width of what streams through memory; compiled with the last of them."""
LOGITS = (4096, 50304)


class Timer:
    """Times of work on one device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.gpu = device == "cuda"

    def randn(self, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*sizes, device=self.device, dtype=torch.float32).to(dtype)

    def of(self, work: Callable[[int], Any], kernels: int = 1) -> float:
        """Median seconds of ``work(i)``, which launches about ``kernels`` kernels on the ``i``-th set of operands."""
        for i in range(3):
            work(i)
        guess = self._row(work, 3, kernels) / 3
        repeats = int(min(max(ROW_S / max(guess, 1e-7), 3), 600 / kernels))
        return statistics.median(self._row(work, repeats, kernels) / repeats for _ in range(ROUNDS))

    def _row(self, work: Callable[[int], Any], repeats: int, kernels: int) -> float:
        if not self.gpu:
            start = time.perf_counter()
            for i in range(repeats):
                work(i)
            return time.perf_counter() - start
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(int(2e9 * (2e-4 + repeats * kernels * 3e-5)))  # the host launches the row meanwhile
        begin.record()
        for i in range(repeats):
            work(i)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3


def sets(bytes_of_one: float) -> int:
    return int(min(max(CACHE // max(bytes_of_one, 1), 2), 32))


def products(timer: Timer) -> Iterator[Row]:
    """Of a linear layer: its result, the gradients of its input and of its weights."""
    for m, n, k in shapes():
        yield from _layer(timer, m, n, k)


def _layer(timer: Timer, m: int, n: int, k: int) -> Iterator[Row]:
    count = sets(2 * (m * k + n * k + m * n))
    xs, ws, gs = ([timer.randn(*size) for _ in range(count)] for size in ((m, k), (n, k), (m, n)))
    yield row("product forward", "bf16", timer.of(lambda i: xs[i % count] @ ws[i % count].t()), m, n, k)
    yield row("product inputs", "bf16", timer.of(lambda i: gs[i % count] @ ws[i % count]), m, k, n)
    yield row("product weights", "bf16", timer.of(lambda i: gs[i % count].t() @ xs[i % count]), n, k, m)


def eight_bits(timer: Timer) -> Iterator[Row]:
    """Products of 8 bits, sums kept in the tensor core (``fast``) or added up outside of it now and then."""
    for m, n, k in shapes():
        if n % 16 == 0 and k % 16 == 0:
            yield from _eight_bits(timer, m, n, k)


def _eight_bits(timer: Timer, m: int, n: int, k: int) -> Iterator[Row]:
    count = sets(m * k + n * k + 2 * m * n)
    xs, ws = ([timer.randn(*size, dtype=torch.float8_e4m3fn) for _ in range(count)] for size in ((m, k), (n, k)))

    def product_of(fast: bool, i: int) -> Tensor:
        return small_product(xs[i % count], ws[i % count], fast)

    for name, fast in (("product fast", True), ("product", False)):
        yield row(name, "fp8", timer.of(partial(product_of, fast)), m, n, k)


def small_product(x: Tensor, w: Tensor, fast: bool) -> Tensor:
    """``x w^T`` in 8 bits, with one scale for each."""
    one = torch.ones((), device=x.device)
    return torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)


def sustained(timer: Timer) -> Iterator[Row]:
    """Large products for four seconds on end, the last of them."""
    size = 8192
    xs, ws = ([timer.randn(size, size) for _ in range(4)] for _ in range(2))
    xs8, ws8 = ([each.to(torch.float8_e4m3fn) for each in some] for some in (xs, ws))
    works: dict[str, Callable[[int], Any]] = {
        "bf16": lambda i: xs[i % 4] @ ws[i % 4].t(),
        "fp8": lambda i: small_product(xs8[i % 4], ws8[i % 4], True),
    }
    for precision, work in works.items():
        began, last = time.perf_counter(), 0.0
        while time.perf_counter() - began < 4:
            last = timer._row(work, 200, 1) / 200
        yield row("sustained product", precision, last, size, size, size)


def grouped(timer: Timer) -> Iterator[Row]:
    """Products of experts, each of as many rows: one kernel for all, and one for each."""
    for experts, rows, (n, k) in itertools.product((2, 8, 16, 32), (512, 1024, 4096), ((2816, 2048), (2048, 1408), (4096, 7168))):
        if experts * (n * k + rows * max(n, k)) * 2 <= 4e9:
            yield from _grouped(timer, experts, rows, n, k)


def _grouped(timer: Timer, experts: int, rows: int, n: int, k: int) -> Iterator[Row]:
    x, w = timer.randn(experts * rows, k), timer.randn(experts, n, k)
    ends = torch.arange(1, experts + 1, device=timer.device, dtype=torch.int32) * rows
    yield row("experts in one", "bf16", timer.of(lambda _: torch._grouped_mm(x, w.transpose(1, 2), offs=ends)), experts, rows, n, k)
    parts = x.view(experts, rows, k)
    in_turn = timer.of(lambda _: [parts[e] @ w[e].t() for e in range(experts)], experts)
    yield row("experts in turn", "bf16", in_turn, experts, rows, n, k)


ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention(timer: Timer) -> Iterator[Row]:
    """Causal, and not."""
    for name, causal, wide in itertools.product(ATTENTION, (True, False), (64, 128)):
        for seq in (256, 512, 1024, 2048, 4096, 8192, 16384) if causal else (1024, 4096):
            yield from _attention(timer, name, causal, seq, wide)


def _attention(timer: Timer, name: str, causal: bool, seq: int, wide: int) -> Iterator[Row]:
    shape = (TOKENS // seq, 2048 // wide, seq, wide)
    q, k, v = (timer.randn(*shape).requires_grad_() for _ in range(3))
    grad = timer.randn(*shape)

    @torch.no_grad()
    def forward(_: int) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    sort = f"{name} attention{'' if causal else ', all scores'}"
    with sdpa_kernel(ATTENTION[name] if timer.gpu else SDPBackend.MATH):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        yield row(f"{sort} forward", "bf16", timer.of(forward, 2), *shape)
        back = timer.of(lambda _: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), 6)
        yield row(f"{sort} backward", "bf16", back, *shape)


def eager_norm(x: Tensor, w: Tensor) -> Tensor:
    """As LLaMA's is written down."""
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As LLaMA's is written down in transformers."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def pointwise(timer: Timer) -> Iterator[Row]:
    """What streams through memory, as tensor operations and compiled."""
    for rows, wide in SIZES:
        yield from _pointwise(timer, rows, wide)


def _pointwise(timer: Timer, rows: int, wide: int) -> Iterator[Row]:
    x, y, sums = timer.randn(rows, wide), timer.randn(rows, wide), timer.randn(rows, wide, dtype=torch.float32)
    yield row("copy", "bf16", timer.of(lambda _: y.copy_(x)), rows, wide)
    yield row("add in place", "bf16", timer.of(lambda _: y.add_(x)), rows, wide)
    yield row("add wide in place", "bf16", timer.of(lambda _: sums.add_(x)), rows, wide)
    y, b, w, cos, sin = (timer.randn(*size) for size in ((rows, wide), (wide,), (wide,), (rows, 1, 128), (rows, 1, 128)))
    works: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
        "layer norm": (lambda x, w, b: F.layer_norm(x, (wide,), w, b), (x, w, b)),
        "rms norm": (lambda x, w: F.rms_norm(x, (wide,), w), (x, w)),
        "norm of tensor operations": (eager_norm, (x, w)),
        "bias and gelu": (lambda x, b: F.gelu(x + b), (x, b)),
        "swiglu": (lambda x, y: F.silu(x) * y, (x, y)),
        "addition": (lambda x, y: x + y, (x, y)),
        "bias, dropout, addition": (lambda x, b, y: y + F.dropout(x + b, 0.1, True), (x, b, y)),
        "dropout": (lambda x: F.dropout(x, 0.1, True), (x,)),
        "rotary": (lambda x, c, s: rotated(x.view(rows, wide // 128, 128), c, s), (x, cos, sin)),
    }
    for name, (made, inputs) in works.items():
        yield from both_ways(timer, f"{name}, eager", made, inputs, rows, wide)
        if (rows, wide) == SIZES[-1]:
            compiled: Callable[..., Tensor] = torch.compile(made, dynamic=False)
            yield from both_ways(timer, f"{name}, compiled", compiled, inputs, rows, wide)


def both_ways(timer: Timer, name: str, made: Callable[..., Tensor], inputs: tuple[Tensor, ...], *sizes: int) -> Iterator[Row]:
    inputs = tuple(each.detach().clone().requires_grad_(each.is_floating_point() and each.numel() > 1) for each in inputs)
    out = made(*inputs)
    grad = torch.randn_like(out)
    yield row(f"{name}, forward", "bf16", timer.of(lambda _: made(*inputs), 12), *sizes)
    wanted = tuple(each for each in inputs if each.requires_grad)
    yield row(f"{name}, backward", "bf16", timer.of(lambda _: torch.autograd.grad(out, wanted, grad, retain_graph=True), 24), *sizes)


def to_8_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """With the scale of the whole tensor, and as columns too."""
    scale = 448 / x.abs().amax().float().clamp(min=1e-12)
    small = (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return small, small.t().contiguous()


def losses(timer: Timer) -> Iterator[Row]:
    """Casts to 8 bits, loss, optimizer."""
    rows, wide = SIZES[-1]
    x = timer.randn(rows, wide)
    rounding: Callable[[Tensor], Any] = torch.compile(to_8_bits, dynamic=False)
    yield row("cast, eager", "fp8", timer.of(lambda _: to_8_bits(x), 8), rows, wide)
    yield row("cast, compiled", "fp8", timer.of(lambda _: rounding(x), 8), rows, wide)
    rows, words = LOGITS
    logits, targets = timer.randn(rows, words), torch.randint(words, (rows,), device=timer.device)

    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), targets).reshape(1)

    for how, made_loss in (("eager", loss), ("compiled", torch.compile(loss, dynamic=False))):
        yield from both_ways(timer, f"loss, {how}", made_loss, (logits,), rows, words)
    parameters = [timer.randn(4096, 4096, dtype=torch.float32).requires_grad_() for _ in range(16)]
    for each in parameters:
        each.grad = torch.randn_like(each)
    adam = torch.optim.AdamW(parameters, fused=timer.gpu)
    yield row("adam", "fp32", timer.of(lambda _: adam.step(), 20), 16 * 4096 * 4096)


def small(timer: Timer) -> Iterator[Row]:
    """Kernels with next to nothing to do, launched beforehand or by a host that the device waits for."""
    x, y = timer.randn(1024), timer.randn(1024)
    yield row("small kernel, launched beforehand", "bf16", timer.of(lambda _: x.add_(y)), 1024)
    if timer.gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(200):
                x.add_(y)
        yield row("small kernel, in a graph", "bf16", timer.of(lambda _: graph.replay(), 200) / 200, 1024)
    a, b = timer.randn(64, 64), timer.randn(64, 64)
    for name, work in (("addition", lambda: x.add_(y)), ("product", lambda: a @ b)):
        yield row(f"launch of an {name}" if name == "addition" else f"launch of a {name}", "bf16", host_time(timer, work), 1)


def host_time(timer: Timer, work: Callable[[], Any], count: int = 400) -> float:
    """Seconds that the host is kept by ``work``; the queue of the driver holds 1,024 launches."""
    found = []
    for _ in range(9):
        if timer.gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            work()
        found.append((time.perf_counter() - start) / count)
    return statistics.median(found)


def blocks(timer: Timer) -> Iterator[Row]:
    """What a block of plain modules keeps the host for (``benchmarks.host_work``), by launches of the cost model."""
    for how in ("", "compiled "):
        made: list[Any] = [torch.compile(block) if how else block for block in host_work.plain().to(timer.device)]
        module = torch.nn.Sequential(*made)
        x = torch.randn(1, host_work.SEQ, host_work.HIDDEN, device=timer.device, requires_grad=True)
        forward, backward = host_work.timed(partial(module, x))
        yield row(f"plain block {how}forward", "fp32", forward, int(KERNELS))
        yield row(f"plain block {how}backward", "fp32", backward, int(2 * KERNELS))


def transfers(timer: Timer) -> Iterator[Row]:
    """Between the device and the host."""
    size = 2**28
    near = torch.empty(size, dtype=torch.uint8, device=timer.device)
    for name, pinned in (("pageable", False), ("pinned", timer.gpu)):
        far = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        for way, into, out_of in (("to the host", far, near), ("to the device", near, far)):
            found = []
            for _ in range(4):
                begun = time.perf_counter()
                into.copy_(out_of)
                if timer.gpu:
                    torch.cuda.synchronize()
                found.append(time.perf_counter() - begun)
            yield row(f"{name} {way}", "uint8", min(found), size)


def row(operation: str, precision: str, seconds: float, *sizes: int) -> Row:
    return dict(zip(FIELDS, (operation, precision, *sizes, *([""] * (4 - len(sizes))), f"{seconds:.4g}")))


PARTS = (small, blocks, products, eight_bits, sustained, attention, grouped, losses, pointwise, transfers)


def measure(path: Path, device: str, only: list[str]) -> None:
    timer = Timer(device)
    name = torch.cuda.get_device_name() if timer.gpu else platform.processor()
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerow(row(f"on {name}, PyTorch {torch.__version__}", "", 0.0))
        for part in PARTS:
            if only and part.__name__ not in only:
                continue
            begun = time.perf_counter()
            try:
                for found in part(timer):
                    writer.writerow(found)
                    file.flush()
            except Exception as error:  # one part that a release of PyTorch has not leaves the others
                print(f"{part.__name__}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
            print(f"{part.__name__}: {time.perf_counter() - begun:.1f} s", flush=True)
            if timer.gpu:
                torch.cuda.empty_cache()


NAMES = {"NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100"}
PRODUCT_CONSTANTS = ("ramp_k", "wave_weight", "small_tile", "unaligned", "kernel")


class Table:
    """Measured seconds by operation and sizes, and the device that they are of."""

    def __init__(self, path: Path) -> None:
        with path.open(newline="") as file:
            first, *self.rows = csv.DictReader(file)
        name = first["operation"].removeprefix("on ").split(",")[0]
        self.device = Device.of(hardware_files()[NAMES[name]], 8)

    def of(self, operation: str, **sizes: int) -> float:
        """The seconds of one operation, of the largest sizes that it was timed with."""
        found = [each for each in self.rows if each["operation"] == operation and all(int(each[k]) == v for k, v in sizes.items())]
        return float(found[-1]["seconds"])

    def elements(self, operation: str) -> int:
        last = [each for each in self.rows if each["operation"] == operation][-1]
        return int(last["a"]) * int(last["b"])

    def widths(self, operation: str) -> float:
        """Bytes an element that the memory could have moved in the time of ``operation``."""
        return self.of(operation) * self.device.bandwidth / self.elements(operation)

    def products(self, precision: str, operations: tuple[str, ...]) -> np.ndarray:
        """Rows, columns, inner sizes and seconds (4, products)."""
        found = [each for each in self.rows if each["precision"] == precision and each["operation"] in operations]
        return np.array([[float(each[key]) for key in ("a", "b", "c", "seconds")] for each in found]).T


def memory_bound(table: Table) -> dict[str, float]:
    """Constants of what streams through memory. ``bandwidth`` is that of all which is counted for a block of fused kernels that adds biases
    (``launcher.cost.time.pointwise``): two norms, two additions each way, and GELU of four times the width."""
    counted = {  # operation: how often a block has it, in hidden sizes, and the bytes an element that are counted for it
        "layer norm, eager, forward": (2, 2 * PASSES["fused"].norm[0]),
        "layer norm, eager, backward": (2, 2 * PASSES["fused"].norm[1]),
        "addition, eager, forward": (4, 2 * PASSES["fused"].residual[0]),
        "bias and gelu, compiled, forward": (4, 2 * PASSES["fused"].activation[0]),
        "bias and gelu, compiled, backward": (4, 2 * PASSES["fused"].activation[1]),
    }
    moved = sum(times * width for times, width in counted.values())
    bandwidth = moved / sum(times * table.widths(name) for name, (times, _) in counted.items())
    loss = [table.widths(f"loss, eager, {way}") / 4 * bandwidth for way in ("forward", "backward")]
    norm = [table.widths(f"norm of tensor operations, eager, {way}") / 2 * bandwidth for way in ("forward", "backward")]
    copies = [4 / table.widths("copy"), 6 / table.widths("add in place"), 10 / table.widths("add wide in place")]
    drops = [2 * DROPOUT_PASSES[i] / table.widths(f"dropout, eager, {way}") for i, way in enumerate(("forward", "backward"))]
    return {
        "bandwidth": bandwidth,
        "streaming": statistics.median(copies),
        "dropout": statistics.mean(drops),
        "cast_bytes": table.widths("cast, compiled") * bandwidth,
        "loss_passes_forward": loss[0],
        "loss_passes_backward": loss[1],
        "eager_norm_forward": norm[0],
        "eager_norm_backward": norm[1],
    }


def of_products(table: Table) -> tuple[dict[str, float], list[str]]:
    """Constants of matrix products, of least squared logarithms over all that were timed, and how far off they leave them."""
    sorts = {"bf16": ("product forward", "product inputs", "product weights"), "fp8": ("product fast", "product")}
    measured = {precision: table.products(precision, operations) for precision, operations in sorts.items()}
    names = (*PRODUCT_CONSTANTS, *(f"rate {precision}" for precision in sorts))
    start = [getattr(SHIPPED, name) for name in PRODUCT_CONSTANTS] + [table.device.rate(precision) for precision in sorts]

    def errors(logarithms: np.ndarray, only: str = "") -> np.ndarray:
        values = dict(zip(names, np.exp(logarithms)))
        constants = replace(SHIPPED, **{name: values[name] for name in PRODUCT_CONSTANTS})
        off = []
        for precision, (m, n, k, seconds) in measured.items():
            if only in ("", precision):
                device = replace(table.device, sustained={precision: values[f"rate {precision}"]})
                counted = matmul.seconds(device, precision, constants, m, n, k) * matmul.on_lines(device, precision, constants, n, k)
                off.append(np.log(counted / seconds))
        return np.concatenate(off)

    most = np.log([np.inf, 1.0, 1.0, 1.0, np.inf, np.inf, np.inf])
    found = scipy.optimize.least_squares(errors, np.log(start), loss="soft_l1", f_scale=0.1, bounds=(-np.inf, most))
    lines = [
        f"{len(seconds)} products in {precision}: median error {statistics.median(abs(np.expm1(errors(at, precision)))):.1%} {what}"
        for precision, (*_, seconds) in measured.items()
        for what, at in (("with the constants in use", np.log(start)), ("with these", found.x))
    ]
    return dict(zip(names, np.exp(found.x))), lines


def of_attention(table: Table) -> tuple[dict[str, float], list[str]]:
    """Constants of flash kernels: one of the generation before on this device ("flash") and its own ("cudnn")."""
    names = ("flash_ramp", "exponentials", *(f"{name} {way}" for name in ("flash", "cudnn") for way in ("forward", "backward")))
    rows = [each for each in table.rows if re.fullmatch(r"(flash|cudnn) attention \w+", each["operation"])]
    scores = np.array([float(each["a"]) * float(each["b"]) * float(each["c"]) ** 2 / 2 for each in rows])
    seq, head, seconds = (np.array([float(each[key]) for each in rows]) for key in ("c", "d", "seconds"))
    backward = np.array([each["operation"].endswith("backward") for each in rows])
    which = np.array([names.index(each["operation"].replace(" attention", "")) for each in rows])
    peak, units = table.device.peak("bf16"), table.device.units * table.device.exp_throughput

    def counted(logarithms: np.ndarray) -> np.ndarray:
        values = np.exp(logarithms)
        products = 4 * scores * head / peak * np.where(backward, 2.5, 1.0) / values[which]
        return (products + scores / (units * values[1])) * (1 + values[0] / seq) + SHIPPED.kernel * np.where(backward, 3, 1)

    start = np.log([SHIPPED.flash_ramp, SHIPPED.exponentials, *(2 * [SHIPPED.flash2_forward, SHIPPED.flash2_backward])])
    found = scipy.optimize.least_squares(lambda at: np.log(counted(at) / seconds), start, loss="soft_l1", f_scale=0.1)
    off = np.expm1(np.log(counted(found.x) / seconds))
    return dict(zip(names, np.exp(found.x))), [f"{len(rows)} attention kernels: median error {statistics.median(abs(off)):.1%}"]


def of_the_host(table: Table) -> dict[str, float]:
    """Launches of plain modules, and kernels with nothing to do; products of experts."""
    ways = {"forward": 1, "backward": 2}
    host = [table.of(f"plain block {way}") / (ways[way] * KERNELS) for way in ways]
    pairs = [each for each in table.rows if each["operation"] == "experts in one"]
    rates = []
    for each in pairs:
        experts, rows, n, k = (int(each[key]) for key in "abcd")
        alone = matmul.seconds(table.device, "bf16", SHIPPED, rows, n, k, experts)
        rates.append(float(alone) / float(each["seconds"]))
    return {
        "host": statistics.mean(host),
        "small kernel": table.of("small kernel, launched beforehand"),
        "grouped": statistics.median(rates),
    }


def shown(table: Table) -> None:
    """Every constant that was measured, beside the value in use and where a fit begins."""
    (products, first), (attention, second) = of_products(table), of_attention(table)
    entries = constant_entries()
    print(f"on {table.device.name}             measured     in use    default")
    for name, value in {**products, **memory_bound(table), **attention, **of_the_host(table)}.items():
        known = f"{entries[name]['value']:10.3g} {entries[name]['default']:10.3g}" if name in entries else ""
        if name.startswith("rate "):
            peak = table.device.peak(name.removeprefix("rate "))
            name, value, known = name + " / peak", value / peak, f"{table.device.rate(name.removeprefix('rate ')) / peak:10.3g}"
        print(f"{name:26s} {value:10.3g} {known}")
    for each in table.rows:
        if each["operation"] == "sustained product":
            rate = 2 * float(each["a"]) ** 3 / float(each["seconds"])
            print(f"{'rate for seconds ' + each['precision']:26s} {rate / table.device.peak(each['precision']):10.3g} of the peak")
    print(*first, *second, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "read"))
    parser.add_argument("table", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--parts", nargs="*", default=[])
    given = parser.parse_args()
    if given.what == "read":
        shown(Table(given.table))
        return
    measure(given.table, given.device, given.parts)


if __name__ == "__main__":
    main()
