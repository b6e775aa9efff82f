"""A trainer that is not ours is run, read and judged: right step times, right reasons, nothing left behind."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from launcher.config import compose, resolve
from launcher.config.rules import run_of
from launcher.config.schema import Config
from launcher.config.trainer import LaunchProfile
from tests import warm
from tests.processes import alive
from trainer.shared.records.log_reader import LogReader
from trainer.shared.run.read import save

pytestmark = pytest.mark.slow

LOG = [r"it (?P<step>\d+) loss (?P<loss>\S+) (?P<milliseconds>[\d.]+) ms", r"peak (?P<memory_mib>[\d.]+) MiB"]
STEPS = "for i in range(1, 6): print(f'it {i} loss {3 / i} {100 + i} ms'); print(f'peak {i}.0 MiB')"


def observed(
    tmp_path: Path, program: str, *overrides: str, env: dict[str, str] | None = None, **launch: Any
) -> tuple[int, dict[str, Any], str]:
    """Exit code, ``result.json`` and output of ``python -m trainer`` on one rank, whose command is a Python ``program``."""
    script = tmp_path / "program.py"
    script.write_text(program)
    settings = {"command": ["{python}", "{script}"], "script": str(script), "log": LOG, **launch}
    config = composed(*overrides)
    profile = dataclasses.replace(config.trainer, name="fake", launch=LaunchProfile(program="command", **settings))
    save(run_of(resolve(dataclasses.replace(config, trainer=profile))), tmp_path / "config.yaml")
    done = warm.run("-m", "trainer", tmp_path / "config.yaml", env=os.environ | (env or {}))
    path = tmp_path / "result.json"
    return done.returncode, json.loads(path.read_text()) if path.exists() else {}, done.stdout + done.stderr


@functools.cache
def composed(*overrides: str) -> Config:
    return compose(["model=gpt_tiny", "cluster.gpus_per_node=1", "run.steps=5", "run.warmup_steps=1", *overrides])


def test_steps_losses_times_and_memory_are_those_of_the_log(tmp_path: Path) -> None:
    code, result, said = observed(tmp_path, STEPS)
    assert (code, result["status"]) == (0, "done")
    assert result["step_times_s"] == pytest.approx([0.101, 0.102, 0.103, 0.104, 0.105]) and result["step_time_s"] == pytest.approx(0.1035)
    assert result["losses"] == pytest.approx([3, 1.5, 1, 0.75, 0.6]) and result["peak_memory_bytes"] == 5 * 2**20
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5] and "it 3 loss" in said
    assert result["tokens_per_s"] == pytest.approx(8 * 128 / 0.1035)


@pytest.mark.parametrize(
    "program, reason, words",
    [
        ("import sys; sys.exit('CUDA out of memory. Tried to allocate 2 GiB')", "out of memory", "Tried to allocate 2 GiB"),
        ("import argparse; argparse.ArgumentParser().parse_args(['--what'])", "configuration", "unrecognized arguments: --what"),
        ("raise RuntimeError('it broke')", "error", "RuntimeError: it broke"),
        ("", "configuration", "tells of 0 steps of 5"),
        ("print('Iteration 1 finished')", "configuration", "Its last lines: Iteration 1 finished"),
        (f"{STEPS.replace('3 / i', 'float(chr(110) + chr(97) + chr(110))')}; import time; time.sleep(100)", "numerics", "the loss of step 1 is nan"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "error", "signal SIGKILL"),
    ],
)  # fmt: skip
def test_a_run_that_measured_nothing_fails_with_its_reason(tmp_path: Path, program: str, reason: str, words: str) -> None:
    code, result, said = observed(tmp_path, program)
    assert code == 1 and (result["status"], result["reason"]) == ("failed", reason) and words in result["message"]
    assert "Traceback (most recent call last)" not in said or "RuntimeError: it broke" in said
    assert json.loads((tmp_path / "failure-0.json").read_text())["reason"] == reason


def test_a_rank_that_crashes_says_where_it_was(tmp_path: Path) -> None:
    code, _, said = observed(tmp_path, "import os, signal; os.kill(os.getppid(), signal.SIGSEGV)")
    assert code == -signal.SIGSEGV and "Fatal Python error: Segmentation fault" in said and f"{os.sep}trainer{os.sep}observe.py" in said


@pytest.mark.parametrize(
    ("time", "words"),
    [
        ("0.0", "reads no time above 0"),
        ("--", "reads no time above 0"),
        ("nan", "reads no time above 0"),
        ("-3", "reads no time above 0"),
        ("inf", "reads no time above 0"),
        ("500,25", "milliseconds='500,25' has a decimal comma"),
        ("0,980", "milliseconds='0,980' has a decimal comma"),
        ("1.500,2", "milliseconds='1.500,2' has a decimal comma"),
    ],
)
def test_what_is_no_time_is_never_a_measurement(time: str, words: str, tmp_path: Path) -> None:
    program = f"for i in range(1, 6): print(f'it {{i}} loss 2.0 {time} ms')"
    _, result, _ = observed(tmp_path, program, log=[r"it (?P<step>\d+) loss (?P<loss>\S+) (?P<milliseconds>\S+) ms"])
    assert (result["status"], result["reason"]) == ("failed", "configuration") and words in result["message"]


@pytest.mark.parametrize(("text", "seconds"), [("1,234.5", 1.2345), ("1,234,567", 1234.567), ("2K", 2.0), ("1e3", 1.0), ("250,", 0.25)])
def test_numbers_are_read_as_trainers_print_them(text: str, seconds: float) -> None:
    reader = LogReader([r"it (?P<step>\S+) (?P<milliseconds>\S+)"], 1, 1, 1)
    reader.take(f"it 7, {text}", 0.0)
    assert reader.rest() == {"step": 7, "loss": None, "grad_norm": None, "step_time_s": pytest.approx(seconds)}


def test_words_where_a_step_stands_elsewhere_are_no_step_and_no_loss(tmp_path: Path) -> None:
    program = "print('it by-step loss begins 0 ms'); print('it nan loss nan 3 ms')\nfor i in range(1, 6): print(f'it {i} loss n/a {i} ms')"
    code, result, _ = observed(tmp_path, program, log=[r"it (?P<step>\S+) loss (?P<loss>\S+) (?P<milliseconds>\S+) ms"])
    assert code == 0 and result["step_times_s"] == pytest.approx([0.001, 0.002, 0.003, 0.004, 0.005]) and result["losses"] == [None] * 5


def test_a_command_that_hangs_is_ended_and_said_so(tmp_path: Path) -> None:
    code, result, _ = observed(tmp_path, "import time; print('begun', flush=True); time.sleep(1000)", "run.timeout_s=2")
    assert (
        (code, result["reason"]) == (1, "communication") and "wrote nothing for 2 s" in result["message"] and "begun" in result["message"]
    )


def test_a_command_that_does_not_exist_is_a_configuration_error(tmp_path: Path) -> None:
    code, result, said = observed(tmp_path, "", command=["no-such-program"])
    assert (code, result["reason"]) == (2, "configuration") and "no-such-program cannot be run" in said and "Traceback" not in said


def test_a_log_in_another_encoding_and_with_progress_bars_is_read(tmp_path: Path) -> None:
    program = "import sys; out = sys.stdout.buffer\nfor i in range(1, 6): out.write(b'\\xff\\xfe 50%|##\\r' + f'it {i} loss 2.0 {i} ms\\r'.encode())"
    code, result, _ = observed(tmp_path, program)
    assert code == 0 and result["step_times_s"] == pytest.approx([0.001, 0.002, 0.003, 0.004, 0.005])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "latin-1"])
def test_a_log_is_read_in_any_encoding_that_keeps_ascii(encoding: str, tmp_path: Path) -> None:
    program = f"import sys\nfor i in range(1, 6): sys.stdout.buffer.write(f'\xe9t\xe9 it {{i}} loss 2.0 {{i}} ms\\n'.encode('{encoding}'))"
    code, result, _ = observed(tmp_path, program, env={"PYTHONIOENCODING": "ascii"})
    assert code == 0 and result["step_times_s"] == pytest.approx([0.001, 0.002, 0.003, 0.004, 0.005])


@pytest.mark.parametrize(("words", "told"), [("bye", "done"), ("Error: No such option", "configuration")])
def test_what_a_terminal_is_told_hides_no_word(words: str, told: str, tmp_path: Path) -> None:
    program = f"{STEPS}\nprint('\\x1b[2K\\x1b[1;31m{words[:3]}\\x1b[0m{words[3:]}'); raise SystemExit({int(told != 'done')})"
    _, result, _ = observed(tmp_path, program, success="^bye")
    assert told in (result["status"], result["reason"]) and "\x1b" not in result["message"]


@pytest.mark.parametrize("end", ["sys.exit(4)", "print()"])
def test_a_line_without_end_takes_neither_forever_nor_the_whole_message(end: str, tmp_path: Path) -> None:
    program = f"import sys\nsys.stdout.write('x' * 20_000_000 + '\\n')\n{STEPS if end == 'print()' else ''}\n{end}"
    _, result, _ = observed(tmp_path, program)
    assert result["status"] == ("done" if end == "print()" else "failed") and len(result["message"]) < 500


def test_lines_of_other_ranks_in_between_change_nothing(tmp_path: Path) -> None:
    """A node's command mixes the output of its ranks: their lines of the same step, and late ones of the step before."""
    program = (
        "for i in range(1, 6):\n print(f'it {i} loss 2.0 {i} ms')\n print(f'it {i} loss 2.0 {i} ms')\n print(f'it {i - 1} loss 9.0 999 ms')"
    )
    code, result, _ = observed(tmp_path, program, starts="node")
    assert code == 0 and result["step_times_s"] == pytest.approx([0.001, 0.002, 0.003, 0.004, 0.005]) and result["losses"] == [2.0] * 5


def test_without_a_time_in_the_log_that_between_steps_counts(tmp_path: Path) -> None:
    program = "import time\nfor i in range(5):\n time.sleep(0.3)\n print({'loss': 1.0 + i}, flush=True)"
    began = time.monotonic()
    code, result, _ = observed(tmp_path, program, log=[r"'loss': (?P<loss>[\d.]+)"])
    assert code == 0 and result["losses"] == [1, 2, 3, 4, 5] and 0.05 < result["step_time_s"] < time.monotonic() - began


def test_lines_that_come_at_once_tell_no_time(tmp_path: Path) -> None:
    """What a program writes into a buffer comes when that is full, or at its end: microseconds apart, which would win every search."""
    program = "import os, time\ntime.sleep(0.5)\nos.write(1, b''.join(b'it %d loss 2.0\\n' % i for i in range(1, 6)))"
    _, result, _ = observed(tmp_path, program, log=[r"it (?P<step>\d+) loss (?P<loss>\S+)"])
    assert (result["status"], result["reason"]) == ("failed", "configuration") and "all lines came at once" in result["message"]


def test_steps_from_a_full_buffer_share_the_time_since_the_last_one() -> None:
    reader = LogReader([r"it (?P<step>\d+)"], 1, 1, 1)
    came = {**dict.fromkeys(range(1, 6), 10.0), **dict.fromkeys(range(6, 11), 20.0), 11: 22.5}
    done = [reader.take(f"it {step}", now) for step, now in came.items()] + [reader.rest()]
    times = {step["step"]: step["step_time_s"] for step in done if step}
    assert times == {**dict.fromkeys(range(1, 12)), 6: 2.0, 11: 0.5}


def test_a_sign_of_success_that_is_missing_is_a_failure(tmp_path: Path) -> None:
    code, result, _ = observed(tmp_path, STEPS, success="training finished")
    assert (code, result["status"]) == (1, "failed") and "training finished" in result["message"]


@pytest.mark.parametrize(("steps", "success", "told"), [
    ("range(1, 6)", None, "done"), ("range(0, 5)", None, "done"), ("range(1, 5)", None, "failed"), ("range(0, 4)", None, "failed"),
    ("(2, 4)", "^bye", "done"), ("range(1, 6)", "^good night", "failed"),
])  # fmt: skip
def test_a_trainer_that_dies_after_its_last_step_is_done_and_its_death_named(steps: str, success: str, told: str, tmp_path: Path) -> None:
    program = f"import os, signal\nfor i in {steps}: print(f'it {{i}} loss 2.0 {{100 + i}} ms')\nprint('bye', flush=True)"
    code, result, _ = observed(tmp_path, f"{program}\nos.kill(os.getpid(), signal.SIGABRT)", success=success)
    assert (code, result["status"]) == (int(told == "failed"), told) and "the trainer ended with signal SIGABRT: bye" in result["message"]
    assert (tmp_path / "failure-0.json").exists() == (told == "failed")
    assert result["message"].startswith("after the last step: ") == (told == "done")


@pytest.mark.parametrize(("steps", "words"), [
    ("range(1, 4)", "its log ends at step 3, and run.steps=5"), ("range(0, 3)", "its log ends at step 2, and run.steps=5"),
    ("range(0, 5)", ""), ("(2, 4)", ""), ("(0, 2, 4)", ""),
])  # fmt: skip
def test_fewer_steps_than_asked_for_are_said(steps: str, words: str, tmp_path: Path) -> None:
    _, result, _ = observed(tmp_path, f"for i in {steps}: print(f'it {{i}} loss 2.0 {{100 + i}} ms')")
    assert (result["status"], result["message"]) == ("done", words)


@pytest.mark.parametrize(("pattern", "line", "first", "later"), [
    (r"it (?P<step>\d+) took (?P<interval_seconds>\S+)", "it {step} took 5.0", None, 0.5),
    (r"it (?P<step>\d+) took (?P<interval_milliseconds>\S+)", "it {step} took 5,000", None, 0.5),
    (r"it (?P<step>\d+): (?P<interval_steps>\d+) in (?P<interval_seconds>\S+)", "it {step}: 4 in 5.0", 1.25, 1.25),
    (r"it (?P<step>\d+): (?P<interval_steps>\d+) in (?P<interval_seconds>\S+)", "it {step}: 0 in 5.0", None, None),
])  # fmt: skip
def test_a_time_of_several_steps_is_shared_among_them(pattern: str, line: str, first: float | None, later: float | None) -> None:
    reader = LogReader([pattern], 1, 1, 1)
    done = [reader.take(line.format(step=step), now) for now, step in enumerate((10, 20, 30))] + [reader.rest()]
    assert [step["step_time_s"] for step in done if step] == [first, later, later]


def test_a_signal_is_passed_on_and_the_run_counts_as_stopped(tmp_path: Path) -> None:
    observed(tmp_path, "pass")
    (tmp_path / "program.py").write_text(
        "import signal, sys, time\ndef end(*_):\n print('saved', flush=True); sys.exit(0)\nsignal.signal(signal.SIGTERM, end)\n"
        "for i in range(1, 3): print(f'it {i} loss 2.0 5 ms', flush=True)\ntime.sleep(1000)"
    )
    rank = warm.Process("-m", "trainer", tmp_path / "config.yaml", "--attempt", "1", stdout=PIPE, text=True)
    while "it 2" not in rank.stdout.readline():
        pass
    rank.send_signal(signal.SIGTERM)
    assert "saved" in rank.stdout.read() and rank.wait(300) == 75
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["reason"]) == ("stopped", "preempted") and len(result["losses"]) == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_that_a_command_started_outlives_its_rank(tmp_path: Path, number: signal.Signals) -> None:
    observed(tmp_path, "pass")
    (tmp_path / "program.py").write_text(
        "import os, time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(1000)"
    )
    rank = warm.Process("-m", "trainer", tmp_path / "config.yaml", "--attempt", "1", stdout=PIPE, text=True)
    child = int(rank.stdout.readline())
    rank.send_signal(number)
    rank.wait(300)
    deadline = time.monotonic() + 300
    while alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_files_lie_where_the_command_is_told_and_ranks_have_torchruns_variables(tmp_path: Path) -> None:
    program = (
        "import json, os, sys\nsettings = json.load(open(sys.argv[1]))\nassert settings == {'micro': 1, 'nested': {'words': ['8 and 8']}, 'tied': True}\n"
        "assert os.environ['RANK'] == '0' and os.environ['WORLD_SIZE'] == os.environ['LOCAL_WORLD_SIZE'] == '1' and os.environ['GROUP_RANK'] == '0' and os.environ['EXTRA'] == 'r0'\n"
        + STEPS
    )
    files = {
        "settings.json": {
            "micro": "{layout.micro_batch}",
            "nested": {"words": ["{run.global_batch} and {run.global_batch}"]},
            "tied": "{model.tied}",
        }
    }
    command = ["{python}", "{script}", "{folder}/settings.json"]
    code, _, said = observed(tmp_path, program, command=command, files=files, environment={"EXTRA": "r{rank}"})
    assert code == 0, said


def test_a_command_finds_its_own_modules_though_a_pod_shows_ranks_ours(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text("VALUE = 3")
    code = str(Path(__file__).parents[2])
    env = {"PYTHONPATH": f"{code}:/its/own", "PYTHONSAFEPATH": "1", "TRIREME_CODE_DIR": code}
    program = f"import os, trainer\nassert trainer.VALUE == 3 and os.environ['PYTHONPATH'] == '/its/own'\n{STEPS}"
    status, _, said = observed(tmp_path, program, env=env)
    assert status == 0, said


def test_observation_needs_neither_torch_nor_yaml(tmp_path: Path) -> None:
    """The environment of another trainer holds what that trainer needs, no more."""
    observed(tmp_path, STEPS)
    (tmp_path / "result.json").unlink()
    hidden = "import sys; sys.modules.update(dict.fromkeys(('torch', 'yaml', 'numpy', 'hydra', 'omegaconf'))); import runpy; runpy.run_module('trainer', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", hidden, str(tmp_path / "config.yaml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "done"
