"""The first quarter of an hour on a machine with GPUs: is what they compute right, how fast is it, and what makes it so.

    make gpu-check                                        # or: python benchmarks/gpu_ladder.py --out gpu-check
    python benchmarks/gpu_ladder.py --device cpu          # the same program on a machine without one, with small models

Parts, each of which may fail without ending the others: losses beside those of the CPU; losses of every layout beside those of one GPU;
rungs from eager fp32 to compiled bf16 for models of three sizes, with the share of the peak, and memory as counted beside what the
allocator gave; the plain PyTorch loop, compiled; `trireme doctor`. Every line goes to ``steps.csv`` and ``report.txt`` in the folder. Exit
code 1 if a comparison failed.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests import farm as farms  # noqa: E402

SMALL: dict[str, Any] = {"layers": 4, "hidden": 256, "heads": 4, "vocab": 1024, "seq": 256}
MODELS: dict[str, dict[str, Any]] = {
    "124M": {"layers": 12, "hidden": 768, "heads": 12, "vocab": 50304, "seq": 1024},
    "1.3B": {"layers": 24, "hidden": 2048, "heads": 16, "vocab": 50304, "seq": 2048},
    "7B, 4 of 32 blocks": {
        "family": "llama", "layers": 4, "hidden": 4096, "heads": 32, "kv_heads": 8, "vocab": 32000, "seq": 4096, "activation": "swiglu",
    },
}  # fmt: skip
BATCHES = {"124M": (32, 16), "1.3B": (8, 4), "7B, 4 of 32 blocks": (2, 1)}
"""Sequences of a step on one GPU, and of a micro-batch."""
RUNGS: dict[str, dict[str, Any]] = {
    "eager fp32": {"run": {"precision": "fp32", "compile": False}},
    "eager bf16": {"run": {"precision": "bf16", "compile": False}},
    "eager bf16, unfused attention": {"run": {"precision": "bf16", "compile": False}, "model": {"attention": "unfused"}},
    "compiled bf16": {"run": {"precision": "bf16", "compile": True}},
    "compiled fp8": {"run": {"precision": "fp8", "compile": True}},
    "compiled bf16, recomputed": {"run": {"precision": "bf16", "compile": True}, "layout": {"recompute": "full"}},
}
LAYOUTS: list[dict[str, Any]] = [
    {"data": 2}, {"tensor": 2}, {"tensor": 2, "sequence_parallel": True}, {"tensor": 2, "sequence_parallel": True, "async_tensor": True},
    {"pipeline": 2}, {"pipeline": 2, "schedule": "zero_bubble"}, {"data": 2, "sharding": {"params": 2, "grads": 2, "optimizer": 2}},
    {"data": 2, "tensor": 2}, {"tensor": 2, "pipeline": 2, "data": 2},
]  # fmt: skip
CLOSE = {"fp32": 1e-3, "bf16": 3e-2}
"""How far losses may differ, relative: sums in another order, and products in TF32 or bf16."""


@dataclass
class Check:
    """A machine, and what was found on it."""

    farm: farms.Farm
    device: str
    gpus: int
    steps: int
    peak_tflops: float | None
    models: list[str] = field(default_factory=lambda: list(MODELS))  # of the ladder
    rungs: list[str] = field(default_factory=lambda: list(RUNGS))
    lines: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: int = 0

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)

    def losses(self, device: str, precision: str, layout: dict[str, Any]) -> list[float]:
        """Of four steps of the small model. Beside the layout ``layout`` may have ``async_tensor``."""
        run = {"precision": precision, "steps": 4, "async_tensor": layout.get("async_tensor", False)}
        layout = {key: value for key, value in layout.items() if key != "async_tensor"}
        return [float(loss) for loss in self.train(device, SMALL, layout, run)["losses"]]

    def train(self, device: str, model: dict[str, Any], layout: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
        """``result.json`` of a run; ``RuntimeError`` with its reason if it failed."""
        ranks = layout.get("data", 1) * layout.get("tensor", 1) * layout.get("pipeline", 1)
        run = {"device": device, "global_batch": 8, "warmup_steps": 1, "seed": 1, "peak_tflops": self.peak_tflops} | run
        data = {"model": model, "layout": {"micro_batch": 1} | layout, "data": {"kind": "synthetic"}, "run": run}
        finished = self.farm.train(data, ranks)
        if set(finished.codes.values()) != {0}:
            last = finished.logs.strip().splitlines()[-1]
            raise RuntimeError(finished.result.get("message", last) if (finished.directory / "result.json").exists() else last)
        return finished.result

    def compare(self, what: str, losses: Callable[[], list[float]], wanted: list[float], limit: float) -> None:
        """One line: how far apart the losses are."""
        try:
            off = max(abs(a - b) / abs(b) for a, b in zip(losses(), wanted, strict=True))
        except RuntimeError as error:
            self.failed += 1
            self.say(f"  FAILED   {what}: {error}")
            return
        self.failed += off > limit
        self.say(f"  {'good' if off <= limit else 'FAILED':8} {what}: losses differ by {off:.1e} (limit {limit:g})")


def correctness(check: Check) -> None:
    """One device beside the CPU in fp64, the truth."""
    truth = check.losses("cpu", "fp64", {})
    for precision, limit in CLOSE.items():
        check.compare(f"{precision} beside fp64 on the CPU", lambda p=precision: check.losses(check.device, p, {}), truth, limit)  # type: ignore[misc]


def layouts(check: Check) -> None:
    """Every layout that there are devices for, beside one device."""
    alone = check.losses(check.device, "fp32", {})
    for layout in LAYOUTS:
        ranks = layout.get("data", 1) * layout.get("tensor", 1) * layout.get("pipeline", 1)
        name = ", ".join(f"{key}={value}" for key, value in layout.items() if key != "sharding") + (
            " sharded" if "sharding" in layout else ""
        )
        if ranks > check.gpus:
            check.say(f"  not run  {name}: {ranks} devices wanted, {check.gpus} here")
        else:
            check.compare(name, lambda layout=layout: check.losses(check.device, "fp32", layout), alone, CLOSE["fp32"])  # type: ignore[misc]


def ladder(check: Check) -> None:
    """Every rung for every model: one line and one row each."""
    for name, model in ({"small": SMALL} if check.device == "cpu" else {name: MODELS[name] for name in check.models}).items():
        batch, micro_batch = BATCHES.get(name, (4, 2))
        for rung, change in ((rung, RUNGS[rung]) for rung in check.rungs):
            run = {"steps": check.steps + 3, "warmup_steps": 3, "global_batch": batch} | change["run"]
            try:
                result = check.train(
                    check.device, model | change.get("model", {}), {"micro_batch": micro_batch} | change.get("layout", {}), run
                )
            except RuntimeError as error:
                check.say(f"  failed   {name}, {rung}: {error}")
                continue
            row = row_of(name, rung, result)
            check.rows.append(row)
            share = f", {row['mfu']:.1%} of the peak" if row["mfu"] else ""
            check.say(
                f"  {name:20} {rung:30} {row['tokens_per_s']:>10,.0f} tokens/s{share}, "
                f"{row['peak_memory_gb']:.2f} GB ({row['counted_gb']:.2f} counted)"
            )


def row_of(model: str, rung: str, result: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": model,
        "rung": rung,
        "step_time_s": result["step_time_s"],
        "tokens_per_s": result["tokens_per_s"],
        "tflops": result["tflops_per_gpu"],
        "mfu": result["mfu"],
        "peak_memory_gb": result["peak_memory_bytes"] / 1e9,
        "counted_gb": sum(result["memory"].values()) / 1e9,
    } | {f"{part}_s": seconds for part, seconds in result["step_split_s"].items()}


def peers(check: Check) -> None:
    """The plain loop beside this trainer, in one run."""
    program(
        check, [sys.executable, str(ROOT / "benchmarks" / "trainer.py"), "--device", check.device, "--only", "trireme 1", "--rounds", "1"]
    )


def doctor(check: Check) -> None:
    """What predictions use from then on: ``hardware=gpu_check``."""
    words = ["doctor", "--name", "gpu_check", f"cluster.gpus_per_node={check.gpus}", f"run.device={check.device}"]
    program(check, [sys.executable, "-m", "launcher.cli.main", *words])


def program(check: Check, words: list[str]) -> None:
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    for line in (done.stdout or done.stderr).strip().splitlines():
        check.say(f"  {line}")
    if done.returncode:
        check.failed += 1
        check.say(f"  FAILED   exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")


PARTS: dict[str, Callable[[Check], None]] = {
    "correctness": correctness, "layouts": layouts, "ladder": ladder, "peers": peers, "doctor": doctor,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS), help="of the ladder")
    parser.add_argument("--rungs", nargs="*", default=list(RUNGS), choices=list(RUNGS), help="of the ladder")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of a rung")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder of steps.csv and report.txt")
    arguments = parser.parse_args()
    farms.PATIENCE_S = 600.0
    with tempfile.TemporaryDirectory() as folder:
        farm = farms.Farm(Path(folder))
        try:
            check = begun(farm, arguments)
            for part in arguments.parts:
                check.say(part)
                began = time.monotonic()
                PARTS[part](check)
                check.say(f"  ({time.monotonic() - began:.0f} s)")
        finally:
            farm.close()
    write(check, arguments.out)
    return 1 if check.failed else 0


def begun(farm: farms.Farm, arguments: argparse.Namespace) -> Check:
    """Of what machine. The parent never touches CUDA: its children are forked."""
    if arguments.device == "cpu":
        return Check(farm, "cpu", 2, arguments.steps, None, [], arguments.rungs)
    asked = "import torch; print(torch.cuda.device_count(), torch.cuda.is_available() and torch.cuda.get_device_name(0), torch.__version__)"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    if said[0] == "0":
        raise SystemExit(
            "error: torch sees no GPU here; give --device cpu, or install a torch for it (make gpu-check TORCH='torch==... ...')"
        )
    from benchmarks.trainer import peak_tflops

    name = " ".join(said[1:-1])
    check = Check(farm, "cuda", int(said[0]), arguments.steps, peak_tflops(name, "bf16"), arguments.models, arguments.rungs)
    check.say(f"{said[0]} x {name}, torch {said[-1]}, bf16 peak {check.peak_tflops or 'unknown'} TFLOP/s")
    return check


def write(check: Check, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.txt").write_text("\n".join(check.lines) + "\n")
    (out / "report.json").write_text(json.dumps({"failed": check.failed, "rows": check.rows}, indent=1) + "\n")
    with (out / "steps.csv").open("w", newline="") as file:
        names = list(dict.fromkeys(columns(check.rows)))
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(check.rows)
    print(f"written to {out}/report.txt and steps.csv; {check.failed or 'no'} comparison{'s' * (check.failed != 1)} failed")


def columns(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        yield from row


if __name__ == "__main__":
    sys.exit(main())
