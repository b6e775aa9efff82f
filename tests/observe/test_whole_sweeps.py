"""Whole sweeps of a program that prints a trainer's real log with planted times: ranking finds the planted order, failures have their reasons."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import main
from launcher.config.trainers import profile
from launcher.trials.store import Store
from tests.observe.test_profiles import LOGS
from trainer.shared.records.outcome import Reason, Status

pytestmark = pytest.mark.slow

FAKE = Path(__file__).with_name("fake_trainer.py")
MICRO = {  # where each trainer is told its micro-batch
    "megatron_core": r"--micro-batch-size=(\d+)", "megatron_bridge": r"micro_batch_size=(\d+)", "torchtitan": r"local_batch_size=(\d+)",
    "deepspeed": r'"train_micro_batch_size_per_gpu": (\d+)', "nanotron": r"micro_batch_size: (\d+)", "olmo_core": r"rank_microbatch_size=(\d+)",
    "huggingface": r"per_device_train_batch_size=(\d+)",
}  # fmt: skip
BEHAVIOUR: dict[str, Any] = {"1": 2.0, "2": 1.5, "4": 1.0, "8": "out of memory", "16": "configuration", "32": "nan"}
FAILURES = {"8": "out of memory", "16": "configuration", "32": "numerics"}
STEPS, BATCH, SEQ, RANKS = 4, 128, 32, 2


def lines(name: str) -> list[str]:
    """The recorded lines with step and loss as fields."""
    text = "\n".join(LOGS[name])
    for pattern in (r"(iteration:? +)\d+", r"(step: +)\d+", r"(step=)\d+", r"(timer.py:197:stop\] 0/)\d+"):
        text = re.sub(pattern, r"\g<1>{step}", text)
    for pattern in (r"(loss: +)[\d.E+]+", r"(CE loss=)[\d.]+", r"('loss': ')[\d.]+"):
        text = re.sub(pattern, r"\g<1>{loss}", text)
    return text.split("\n")


def sweep(name: str, behaviour: dict[str, Any] = BEHAVIOUR, timeout_s: int = 300) -> int:
    """``trireme train -m`` over micro-batches, in the folder of the process. Its exit code."""
    log = lines(name) + (["step: {step} loss: {loss}"] if name == "deepspeed" else [])
    scale = SEQ if name == "olmo_core" else 1  # tokens there
    planted = {str(int(micro) * scale): what for micro, what in behaviour.items()}
    told = {"micro": MICRO[name], "behaviour": planted, "reports": profile(name).launch.reports, "steps": STEPS, "ranks": RANKS,
            "tokens": BATCH * SEQ, "samples": BATCH, "log": log, "sleeps": name == "huggingface"}  # fmt: skip
    Path("plan.json").write_text(json.dumps(told))
    command = json.dumps([str(FAKE) if word in ("-m", "{script}") else word for word in profile(name).launch.command])
    return main([
        "train", "-m", f"trainer={name}", f"trainer.launch.command={command}", f"trainer.launch.script={FAKE}", "sweep.name=drill",
        f"+trainer.launch.environment={{PLAN: '{Path('plan.json').absolute()}'}}", "model=llama_tiny", f"model.seq={SEQ}", "data=synthetic",
        f"cluster.gpus_per_node={RANKS}", f"run.global_batch={BATCH}", f"run.steps={STEPS}", "run.warmup_steps=1", f"run.timeout_s={timeout_s}", "sweep.retries=0", "run.precision=bf16",
        f"layout.micro_batch={','.join(behaviour)}",
    ])  # fmt: skip


GATE = ("megatron_core", "deepspeed", "huggingface")
"""The last rank reports; the micro-batch stands in a file; the log tells no time. Other trainers' logs are read in test_profiles.py too."""


@pytest.mark.parametrize(
    "name", [*GATE, *(pytest.param(name, marks=pytest.mark.campaign("launchers")) for name in sorted({*LOGS} - {*GATE}))]
)
def test_the_planted_order_is_ranked_and_every_failure_has_its_reason(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sweep(name) == 1, "some trials failed"
    capsys.readouterr()
    assert main(["rank", "drill", "--json"]) == 0
    ranked = json.loads(capsys.readouterr().out)
    placed = [trial for trial in ranked if trial["place"]]
    assert [trial["layout"]["micro_batch"] for trial in placed] == [4, 2, 1]
    if name != "huggingface":  # its log tells no time: that between two lines counts
        assert [trial["step_time_s"] for trial in placed] == pytest.approx([1.0, 1.5, 2.0], rel=1e-3)
    assert not any(trial["other_model"] for trial in placed)
    failed = {str(trial["layout"]["micro_batch"]): trial["reason"] for trial in ranked if not trial["place"]}
    assert failed == FAILURES


STRANGE = """
import os, sys
zero, micro, steps = map(int, sys.argv[1:])
if int(os.environ["RANK"]) == 0:
    for step in range(1, steps + 1):
        loss = 9 - step / 10 + (zero == 3) / 2 + DIFFERENT * micro
        print(f"it {step} loss {loss} {(100 if zero == 3 else 200) / micro} ms", flush=True)
"""


@pytest.mark.parametrize("agree", [True, pytest.param(False, marks=pytest.mark.campaign("launchers"))])
def test_a_layout_that_trains_another_model_never_wins_silently(
    agree: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sharded parameters halve the time here, and change the loss. Where no two layouts agree, nobody knows which one is right."""
    monkeypatch.chdir(tmp_path)
    Path("strange.py").write_text(STRANGE.replace("DIFFERENT", "0" if agree else "3"))
    words = [
        "trainer.launch.program=command", "trainer.launch.script=strange.py", "trainer.name=strange",
        "trainer.launch.command=['{python}','{script}','{zero}','{layout.micro_batch}','{run.steps}']",
        r"trainer.launch.log=['it (?P<step>\d+) loss (?P<loss>\S+) (?P<milliseconds>\S+) ms']",
        "model=gpt_tiny", "hardware=a100_80", "cluster.gpus_per_node=2", "run.global_batch=16", "run.steps=4", "search.doubt=0.001",
    ]  # fmt: skip
    assert main(["search", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["other_losses"] and all(one["cannot_win"] == agree for one in found["other_losses"])
    if agree:
        assert all("zero-3" in one["layout"] for one in found["other_losses"])
        assert found["ranking"][0]["layout"] == "t1 p1 d2 mb8" and found["ranking"][0]["step_time_s"] == pytest.approx(0.025)
        assert " 0 " in " ".join(Path(found["command"]).read_text().split())
    assert main(["search", *words]) == 0
    said = capsys.readouterr().out
    assert ("does not train the same model" if agree else "most trials disagree") in " ".join(said.split())


def test_a_trainer_that_falls_silent_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A sweep of its own: the others are not to be taken for silent because the machine is slow."""
    monkeypatch.chdir(tmp_path)
    sweep("megatron_core", {"64": "hang"}, timeout_s=2)
    capsys.readouterr()
    assert main(["rank", "drill", "--json"]) == 0
    assert [(trial["place"], trial["reason"]) for trial in json.loads(capsys.readouterr().out)] == [(None, "communication")]


SLEEPER = """
import itertools, time
for step in itertools.count(1):
    time.sleep(0.05)
    print(f"it {step} loss {9 - step / 1e6} 50 ms", flush=True)
"""


@pytest.mark.parametrize("trainer", ["own", "command"])
def test_a_search_does_not_wait_for_steps_that_tell_nothing_new(
    trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All steps would take hours."""
    monkeypatch.chdir(tmp_path)
    Path("sleeper.py").write_text(SLEEPER)
    command = [
        "trainer.launch.program=command", "trainer.launch.script=sleeper.py", "trainer.name=sleeper",
        "trainer.launch.command=['{python}','{script}']", r"trainer.launch.log=['it (?P<step>\d+) loss (?P<loss>\S+) (?P<milliseconds>\S+) ms']",
    ]  # fmt: skip
    words = [
        "model=gpt_tiny", "hardware=a100_80", "data=synthetic", "cluster.gpus_per_node=2", "run.global_batch=8", "run.steps=1000000",
        "search.max_trials=1", "search.enough=0.5",
    ]  # fmt: skip
    assert main(["search", *words, *(command if trainer == "command" else []), "sweep.name=brief", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["ranking"]) == 1
    records = Store("runs").sweep("brief").records
    assert [(record.status, record.reason) for record in records] == [(Status.DONE, Reason.MEASURED)]
    assert all("of 999998 measured steps" in record.detail for record in records)
    assert main(["rank", "brief", "--json"]) == 0
    ranked = json.loads(capsys.readouterr().out)
    assert [one["place"] for one in ranked] == [1] and not any(one["other_model"] for one in ranked)
    if trainer == "own":
        assert all(one["peak_memory_bytes"] and one["mfu"] is not None for one in ranked), "the trainer itself wrote the result"


PARTED = """
import os, sys, time
from pathlib import Path
trial, shutdown, failing = Path(sys.argv[1]).parent, SHUTDOWN, int(os.environ["RANK"]) == FAILING
def wait(name):
    while not (trial / name).exists():
        time.sleep(0.01)
if failing:
    if shutdown:
        wait("result.json")
    sys.exit("torch.OutOfMemoryError: CUDA out of memory")
for step in range(1, 9):
    print(f"it {step} loss 2 150 ms", flush=True)
    if not shutdown:
        wait("failure-FAILING.json")
"""


@pytest.mark.parametrize(("shutdown", "failing", "reports"), [
    (True, 1, "first"), (False, 0, "last"),
    *(pytest.param(*case, marks=pytest.mark.campaign("launchers")) for case in [(True, 0, "last"), (False, 1, "first")]),
])  # fmt: skip
def test_a_trial_is_done_only_if_no_rank_failed_before_its_shutdown(
    shutdown: bool, failing: int, reports: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ranks do not wait for each other: the one that reports ends well while the other fails, at once or when the last step is over."""
    monkeypatch.chdir(tmp_path)
    Path("parted.py").write_text(PARTED.replace("FAILING", str(failing)).replace("SHUTDOWN", str(shutdown)))
    words = [
        "trainer.launch.program=command", "trainer.launch.script=parted.py", "trainer.name=parted", f"trainer.launch.reports={reports}",
        "trainer.launch.command=['{python}','{script}','{folder}']",
        r"trainer.launch.log=['it (?P<step>\d+) loss (?P<loss>\S+) (?P<milliseconds>\S+) ms']",
        "model=gpt_tiny", "data=synthetic", "cluster.gpus_per_node=2", "run.global_batch=8", "run.steps=8", "sweep.name=parted",
    ]  # fmt: skip
    assert main(["train", *words]) == (0 if shutdown else 1)
    (record,) = Store("runs").sweep("parted").records
    told = (record.read_result() or {})["status"]
    if shutdown:
        assert (record.status, told) == (Status.DONE, "done")
        assert record.detail.startswith(f"after the last step: rank {failing}: the trainer ended with exit code 1")
    else:
        assert (record.status, record.reason, told) == (Status.FAILED, Reason.OUT_OF_MEMORY, "failed")
