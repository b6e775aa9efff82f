"""What is read of a GPU's state: with a played library of the driver, and on a machine without one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.results.ranking import gpu_faults
from trainer.measure.gpu import of_all_gpus
from trainer.shared.records.trial_files import summary_metrics

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler, which makes the played library of the driver")
PLAYED = Path(__file__).with_name("played_nvml.c")
STEPS = """
import json, sys
from trainer.measure.gpu import GpuMonitor
monitor = GpuMonitor(sys.argv[1])
monitor.sample()
monitor.begin()
for _ in range(4):
    monitor.sample()
    monitor.steps += 1
print(json.dumps([monitor.figures(), [name for name in ("torch", "pynvml") if name in sys.modules]]))
"""


def figures(uuid: str, library: Path | None = None) -> dict[str, Any]:
    environment = os.environ | ({} if library is None else {"LD_LIBRARY_PATH": str(library)})
    ran = subprocess.run([sys.executable, "-c", STEPS, uuid], capture_output=True, text=True, env=environment)
    assert (ran.returncode, ran.stderr) == (0, "")
    found, imported = json.loads(ran.stdout)
    assert "torch" not in imported
    return dict(found)


def played(folder: Path, *options: str) -> Path:
    subprocess.run(["gcc", "-shared", "-fPIC", *options, "-o", str(folder / "libnvidia-ml.so.1"), str(PLAYED)], check=True)
    return folder


@needs_compiler
def test_figures_are_those_since_the_warm_up(tmp_path: Path) -> None:
    found = figures("GPU-1", played(tmp_path, "-DWITH_ECC"))
    assert found.pop("power_w") > 0 and found.pop("host")
    assert found == {
        "gpu": "GPU-1",
        "clock_mhz": 1550,
        "most_clock_mhz": 1980,
        "energy_per_step_j": 1.5,
        "memory_errors": 1,
        "slowed_by": {"power limit": 1, "temperature (hardware)": 0.5},
    }


@needs_compiler
def test_what_a_driver_or_gpu_does_not_know_is_missing_and_nothing_else(tmp_path: Path) -> None:
    assert figures("GPU-1") == {}, "no driver here"
    library = played(tmp_path)
    assert figures("GPU-2", library) == {}, "a GPU that NVML does not know"
    assert "memory_errors" not in (found := figures("GPU-1", library)) and found["energy_per_step_j"] == 1.5


def test_a_gpu_of_two_ranks_counts_once_and_sums_are_of_all() -> None:
    one, two = ({"gpu": f"GPU-{i}", "host": "n1", "energy_per_step_j": 10.0 * i, "clock_mhz": 1000 * i, "slowed_by": {}} for i in (1, 2))
    found = of_all_gpus([one, one, two | {"memory_errors": 1}])
    assert [gpu["rank"] for gpu in found.pop("gpus")] == [0, 2]
    assert found == {"energy_per_step_j": 30.0, "gpu_clock_mhz": 1000}, "errors of one GPU of two are not those of all"
    assert summary_metrics({"status": "done", **found}) == found
    assert of_all_gpus([{}, {}]) == {}


def test_a_fault_is_named_and_the_power_limit_is_none() -> None:
    gpu = {"rank": 3, "host": "n1", "gpu": "GPU-1", "memory_errors": 0, "slowed_by": {"power limit": 1.0}}
    assert gpu_faults([gpu]) == () == gpu_faults(None) == gpu_faults([{"rank": 0, "slowed_by": 3}])
    hot = gpu | {"memory_errors": 2, "slowed_by": {"power limit": 1.0, "temperature": 0.25}}
    said = "slowed down by temperature in 25 % of the readings; memory errors that could not be corrected: 2"
    assert gpu_faults([gpu, hot]) == (f"rank 3 on n1 (GPU-1): {said}",)
