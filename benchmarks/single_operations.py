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
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

FIELDS = ("operation", "precision", "a", "b", "c", "d", "seconds")
CACHE = 2**28
"""Bytes: sets of operands are taken in turn that hold as much, several times what a second-level cache does."""
ROW_S = 8e-3
ROUNDS = 3
Row = dict[str, Any]
Work = Callable[[], Any]

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
        count = sets(2 * (m * k + n * k + m * n))
        xs, ws, gs = ([timer.randn(*size) for _ in range(count)] for size in ((m, k), (n, k), (m, n)))
        ways: dict[str, tuple[Callable[[int], Any], tuple[int, int, int]]] = {
            "forward": (lambda i: xs[i % count] @ ws[i % count].t(), (m, n, k)),
            "inputs": (lambda i: gs[i % count] @ ws[i % count], (m, k, n)),
            "weights": (lambda i: gs[i % count].t() @ xs[i % count], (n, k, m)),
        }
        for way, (work, sizes) in ways.items():
            yield row(f"product {way}", "bf16", timer.of(work), *sizes)


def eight_bits(timer: Timer) -> Iterator[Row]:
    """Products of 8 bits, sums kept in the tensor core (``fast``) or added up outside of it now and then."""
    one = torch.ones((), device=timer.device)
    for m, n, k in shapes():
        if n % 16 or k % 16:
            continue
        count = sets(m * k + n * k + 2 * m * n)
        xs, ws = ([timer.randn(*size, dtype=torch.float8_e4m3fn) for _ in range(count)] for size in ((m, k), (n, k)))
        for fast in (True, False):

            def work(i: int, fast: bool = fast) -> Any:
                return torch._scaled_mm(xs[i % count], ws[i % count].t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

            yield row("product fast" if fast else "product", "fp8", timer.of(work), m, n, k)


def sustained(timer: Timer) -> Iterator[Row]:
    """Large products for seconds on end, the last second of them."""
    size = 8192
    xs, ws = ([timer.randn(size, size) for _ in range(4)] for _ in range(2))
    one = torch.ones((), device=timer.device)
    eight = [[x.to(torch.float8_e4m3fn) for x in each] for each in (xs, ws)]
    for precision in ("bf16", "fp8"):

        def work(i: int, precision: str = precision) -> Any:
            if precision == "bf16":
                return xs[i % 4] @ ws[i % 4].t()
            return torch._scaled_mm(eight[0][i % 4], eight[1][i % 4].t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

        began, last = time.perf_counter(), 0.0
        while time.perf_counter() - began < 4:
            last = timer._row(work, 200, 1) / 200
        yield row("sustained product", precision, last, size, size, size)


def grouped(timer: Timer) -> Iterator[Row]:
    """Products of experts, each of as many rows: one kernel for all, and one for each."""
    for experts, rows, (n, k) in itertools.product((2, 8, 16, 32), (512, 1024, 4096), ((2816, 2048), (2048, 1408), (4096, 7168))):
        if experts * (n * k + rows * max(n, k)) * 2 > 4e9:
            continue
        x, w = timer.randn(experts * rows, k), timer.randn(experts, n, k)
        ends = torch.arange(1, experts + 1, device=timer.device, dtype=torch.int32) * rows
        yield row("experts in one", "bf16", timer.of(lambda _: torch._grouped_mm(x, w.transpose(1, 2), offs=ends)), experts, rows, n, k)
        parts = x.view(experts, rows, k)
        turn = timer.of(lambda _: [parts[e] @ w[e].t() for e in range(experts)], experts)
        yield row("experts in turn", "bf16", turn, experts, rows, n, k)


KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention(timer: Timer) -> Iterator[Row]:
    """Causal, and not."""
    for name, causal, wide in itertools.product(KERNELS, (True, False), (64, 128)):
        for seq in (256, 512, 1024, 2048, 4096, 8192, 16384):
            if not causal and seq not in (1024, 4096):
                continue
            heads = 2048 // wide
            q, k, v = (timer.randn(TOKENS // seq, heads, seq, wide).requires_grad_() for _ in range(3))
            grad = timer.randn(TOKENS // seq, heads, seq, wide)
            with sdpa_kernel(KERNELS[name] if timer.gpu else SDPBackend.MATH):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)

                def forward(_: int) -> Any:
                    with torch.no_grad():
                        F.scaled_dot_product_attention(q, k, v, is_causal=causal)

                sort = f"{name} attention{'' if causal else ', all scores'}"
                yield row(f"{sort} forward", "bf16", timer.of(forward, 2), TOKENS // seq, heads, seq, wide)
                back = timer.of(lambda _: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), 6)
                yield row(f"{sort} backward", "bf16", back, TOKENS // seq, heads, seq, wide)


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
        x, y, b, w = timer.randn(rows, wide), timer.randn(rows, wide), timer.randn(wide), timer.randn(wide)
        for name, copied, kernels in (
            ("copy", lambda _: y.copy_(x), 1),
            ("add in place", lambda _: y.add_(x), 1),
            ("add wide in place", lambda _, a=timer.randn(rows, wide, dtype=torch.float32): a.add_(x), 1),
        ):
            yield row(name, "bf16", timer.of(copied, kernels), rows, wide)
        y = timer.randn(rows, wide)
        cos, sin = timer.randn(rows, 128), timer.randn(rows, 128)
        works: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
            "layer norm": (lambda x, w, b: F.layer_norm(x, (wide,), w, b), (x, w, b)),
            "rms norm": (lambda x, w: F.rms_norm(x, (wide,), w), (x, w)),
            "norm of tensor operations": (eager_norm, (x, w)),
            "bias and gelu": (lambda x, b: F.gelu(x + b), (x, b)),
            "swiglu": (lambda x, y: F.silu(x) * y, (x, y)),
            "addition": (lambda x, y: x + y, (x, y)),
            "bias, dropout, addition": (lambda x, b, y: y + F.dropout(x + b, 0.1, True), (x, b, y)),
            "dropout": (lambda x: F.dropout(x, 0.1, True), (x,)),
            "rotary": (lambda x, c, s: rotated(x.view(rows, wide // 128, 128), c[:, None], s[:, None]), (x, cos, sin)),
        }
        for name, (made, inputs) in works.items():
            for how in ("eager", "compiled") if (rows, wide) == SIZES[-1] else ("eager",):
                made_so = made if how == "eager" else torch.compile(made, dynamic=False)
                yield from both_ways(timer, f"{name}, {how}", made_so, inputs, rows, wide)


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
    for how, made in (("eager", to_8_bits), ("compiled", torch.compile(to_8_bits, dynamic=False))):
        yield row(f"cast, {how}", "fp8", timer.of(lambda _, made=made: made(x), 8), rows, wide)
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


def host_time(timer: Timer, work: Work, count: int = 400) -> float:
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
    from benchmarks import host_work

    for how in ("", "compiled"):
        made = host_work.plain().to(timer.device)
        if how:
            made = torch.nn.Sequential(*[torch.compile(block) for block in made])
        x = torch.randn(1, host_work.SEQ, host_work.HIDDEN, device=timer.device, requires_grad=True)
        forward, backward = host_work.timed(lambda: made(x))
        for way, seconds in (("forward", forward), ("backward", backward)):
            yield row(f"plain block {how + ' ' if how else ''}{way}", "fp32", seconds, host_work.KERNELS * (1 if way == "forward" else 2))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "read"))
    parser.add_argument("table", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--parts", nargs="*", default=[])
    given = parser.parse_args()
    measure(given.table, given.device, given.parts)


if __name__ == "__main__":
    sys.exit(main())
