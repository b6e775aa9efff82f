"""What a run measures and writes, what is read of other trainers, communication that is counted."""

from __future__ import annotations

from tests.planted.defect import Defect

DEFECTS = [
    Defect(
        "an older attempt overwrites a newer result",
        "trainer/shared/records/trial_files.py",
        'if written > data["attempt"]:',
        'if written > data["attempt"] + 1:',
        "tests/shared/test_outcomes.py tests/trials/test_outcome.py",
    ),
    Defect(
        "of a step that ran twice the first line counts",
        "trainer/shared/records/trial_files.py",
        'steps = {line["step"]: line for line in step_lines(Tail(directory / METRICS))}',
        'steps = {line["step"]: line for line in reversed(step_lines(Tail(directory / METRICS)))}',
        "tests/results/test_ranking.py tests/trials/test_store.py",
    ),
    Defect(
        "milliseconds of another trainer are seconds",
        "trainer/shared/records/log_reader.py",
        '"milliseconds": 1e-3}',
        '"milliseconds": 1.0}',
        "tests/observe/test_profiles.py",
    ),
    Defect(
        "a rank's rate is that of all",
        "trainer/shared/records/log_reader.py",
        '"tokens_per_s_per_rank": self._tokens / self._ranks,',
        '"tokens_per_s_per_rank": self._tokens,',
        "tests/observe/test_profiles.py",
    ),
    Defect(
        "an all-reduce is counted once",
        "trainer/comm/collectives.py",
        'share = {"all_reduce": 2.0,',
        'share = {"all_reduce": 1.0,',
        "tests/numerics/test_communication_volume.py",
    ),
    Defect(
        "throughput is that of one rank",
        "trainer/shared/records/summary.py",
        '"tokens_per_s": tokens_per_step(config) / step_time,',
        '"tokens_per_s": tokens_per_step(config) / step_time / ranks,',
        "tests/shared/test_rates.py",
    ),
    Defect(
        "attention is half of what it is in a model's FLOPs",
        "trainer/shared/run/flops.py",
        "return 4 * seq**2 * width / (2 if causal else 1)",
        "return 2 * seq**2 * width / (2 if causal else 1)",
        "tests/trainer/test_parts.py",
    ),
    Defect(
        "a GPU that two ranks share spends its energy twice",
        "trainer/measure/gpu.py",
        'gpus = {own["gpu"]: {"rank"',
        'gpus = {rank: {"rank"',
        "tests/trainer/test_gpu_health.py",
    ),
    Defect(
        "a GPU at its power limit has a fault",
        "launcher/results/ranking.py",
        'USUAL = ("power limit",)',
        "USUAL = ()",
        "tests/trainer/test_gpu_health.py",
    ),
]
