"""Slurm: the conformance suite on a real cluster, and what only this backend promises."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from launcher.backends import backend_for
from launcher.backends.slurm.backend import SlurmBackend
from launcher.backends.slurm.owned import SBATCH, SRUN
from launcher.cli import status
from launcher.trials import exclusion
from tests import warm
from tests.backends.conformance import Conformance, Ground, SearchConformance, closing
from tests.backends.slurm_support import (
    CLUSTER,
    PASSED_ON,
    PROJECT,
    SRUN_PASSED_ON,
    Running,
    interpreter,
    run,
    squeue,
    submissions,
    trial,
    warmth,
)
from tests.clusters.slurm import Cluster
from tests.clusters.slurm.fixture import Slurm
from tests.sweep.support import until
from trainer.health import bad_nodes
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import read_json


@pytest.fixture(scope="module")
def ground(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    folder = tmp_path_factory.mktemp("runs") / "trials"
    cluster = dataclasses.replace(CLUSTER, gpus_per_node=2, code="snapshot", **warmth())
    unknown = {"job_id": "4000000_0", "array": "trireme-nobody-00000000", "attempt": 0, "directory": str(folder)}
    yield from closing(Ground(lambda: backend_for(cluster), cluster, folder, unknown=unknown))


class TestSlurm(Conformance):
    """The conformance suite."""


@pytest.mark.campaign("slurm")
class TestSearchOnSlurm(SearchConformance):
    """Inference."""


@pytest.fixture
def python(tmp_path: Path) -> str:
    return interpreter(tmp_path, "tests.backends.played_trainer")


# ---------------------------------------------------------------- ranks on several nodes


def test_ranks_meet_across_nodes_that_they_do_not_fill(slurm: Slurm, tmp_path: Path) -> None:
    """Three ranks on two nodes of two, which find each other by address because names do not resolve there."""
    cluster = {"gpus_per_node": 2, "nodes": 2, "setup": ["getent() { return 2; }", "export LOADEDMODULES=cuda/12.4"]}
    (record,) = run(tmp_path, trial(data=3, **cluster, **warmth()))
    assert record.status is Status.DONE, record.detail
    result = record.read_result() or {}
    assert result["world_size"] == 3 and len(result["hosts"]) == len(record.nodes) == 2
    assert result["versions"]["modules"] == "cuda/12.4"


def test_torchrun_starts_the_ranks_of_a_node(slurm: Slurm, tmp_path: Path) -> None:
    (record,) = run(tmp_path, trial(ranks=2, nodes=2, launch="torchrun", **warmth()))
    assert record.status is Status.DONE, record.detail
    assert all((record.directory / "logs" / f"attempt0.rank{rank}.log").exists() for rank in range(2))


def test_each_rank_knows_its_place_on_its_node(slurm: Slurm, tmp_path: Path) -> None:
    tell = tmp_path / "python"
    tell.write_text('#!/bin/sh\necho "$RANK $LOCAL_RANK $LOCAL_WORLD_SIZE $WORLD_SIZE $(hostname)"\n')
    tell.chmod(0o755)
    (record,) = run(tmp_path, trial(data=3, gpus_per_node=2, nodes=2, python=str(tell)))
    told = [path.read_text().split() for path in sorted((record.directory / "logs").glob("attempt0.rank*.log"))]
    assert [line[:4] for line in told] == [["0", "0", "2", "3"], ["1", "1", "2", "3"], ["2", "0", "1", "3"]]
    assert told[0][4] == told[1][4] != told[2][4]


def test_a_launcher_inside_a_job_submits_jobs_of_their_own_size(slurm: Slurm, tmp_path: Path, python: str) -> None:
    code = "import sys; from pathlib import Path; from tests.backends.slurm_support import run, trial; run(Path(sys.argv[1]), trial(python=sys.argv[2]))"
    inside = ["srun", "--ntasks=1", "--cpus-per-task=3", "--job-name=outer", sys.executable, "-c", code, str(tmp_path), python]
    told = subprocess.run(inside, check=True, cwd=PROJECT, capture_output=True, stdin=subprocess.DEVNULL, text=True)
    assert re.search(r"this command runs inside of Slurm's job \d+, whose nodes \(n\d\) its trials do not use", told.stderr)
    assert [cpus for name, cpus in squeue("Name", "NumCPUs") if name in submissions(tmp_path)] == ["1"]


# ---------------------------------------------------------------- health


def test_a_bad_node_is_named_and_avoided(idle: Cluster, tmp_path: Path) -> None:
    sick = interpreter(tmp_path, "tests.backends.sick_trainer")
    either = tmp_path / "either"
    either.write_text(f'#!/bin/sh\n[ "$4" = trainer.health ] && exec {sick} "$@"\nexec {warmth().get("python", sys.executable)} "$@"\n')
    either.chmod(0o755)
    (record,) = run(tmp_path, trial(ranks=2, nodes=2, python=str(either), health_check=True))
    assert record.status is Status.DONE, record.detail
    first = record.history[0]
    assert first["bad_nodes"] == ["n2"] and "n2" in first["nodes"] and "n2" in first["detail"]
    assert "n2" not in record.nodes
    assert "device and memory are good" in (record.directory / "logs/attempt1.health.rank0.log").read_text()


@pytest.fixture
def bad_once(tmp_path: Path) -> str:
    """An interpreter whose first health check says that n2 is bad; ranks and checks are played."""
    played, seen, path = interpreter(tmp_path, "tests.backends.played_trainer"), tmp_path / "seen", tmp_path / "bad_once"
    check = f'[ "$RANK" != 0 ] || [ -e {seen} ] && exit 0; touch {seen}; echo n2 >"$5"; exit 1'
    path.write_text(f'#!/bin/sh\nif [ "$4" = trainer.health ]; then {check}; fi\nexec {played} "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_a_bad_node_is_used_again_when_all_nodes_are_asked_for(
    slurm: Slurm, tmp_path: Path, bad_once: str, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.breakable()
    (record,) = run(tmp_path, trial(data=4, nodes=4, python=bad_once, health_check=True))
    assert record.status is Status.DONE, record.detail
    assert record.history[0]["bad_nodes"] == ["n2"] and "n2" in record.nodes
    assert "attempt 1 uses n2 (at fault in attempt 0) again" in capsys.readouterr().err


def test_a_job_that_waits_may_use_a_bad_node_again_after_a_while(
    idle: Cluster, tmp_path: Path, bad_once: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three nodes of three that are free: the second attempt, which leaves one out, could only start much later."""
    exclusions, ahead = exclusion.exclusions, [0.0]
    monkeypatch.setattr(exclusion, "exclusions", lambda history, seconds, now: exclusions(history, seconds, now + ahead[0]))
    other = ["sbatch", "--parsable", "--exclusive", "--nodelist=n1", "--output=/dev/null", "--wrap=sleep 500"]
    job = subprocess.run(other, check=True, capture_output=True, text=True).stdout.strip()
    until(lambda: ["RUNNING"] in [row[1:] for row in squeue("JobID", "State") if row[0] == job])
    try:
        sweep = Running(tmp_path, trial(data=3, nodes=3, exclusive=True, python=bad_once, health_check=True, avoid_s=86400.0))
        until(lambda: ["n2"] in [(read_json(path) or {}).get("avoided") for path in tmp_path.glob("trials/*/trial.json")])
        until(lambda: "PENDING" in [state for name, state in squeue("Name", "State") if name in submissions(tmp_path)])
        ahead[0] = 86400.0
        (record,) = sweep.ended()
    finally:
        subprocess.run(["scancel", job], check=True)
    assert record.status is Status.DONE, record.detail
    assert "--exclude=n2\n" in (record.directory / "logs/attempt1.submitted.txt").read_text()
    assert sorted(record.nodes) == ["n2", "n3", "n4"]


def test_a_node_is_bad_when_one_of_its_ranks_is() -> None:
    assert bad_nodes({0: "good", 1: "good", 2: "good"}, 3, 2, ["n1", "n2"]) == []
    assert bad_nodes({0: "good", 1: "broken", 2: "good"}, 3, 2, ["n1", "n2"]) == ["n1"]
    assert bad_nodes({0: "good", 1: "good"}, 3, 2, ["n1", "n2"]) == ["n2"], "a rank that does not arrive"


@pytest.mark.parametrize(("rank", "node"), [(0, "n1"), (7, "n1"), (8, "n2"), (11, "n2")])
def test_a_bad_node_is_the_one_that_its_rank_runs_on_where_ranks_do_not_fill_the_last(rank: int, node: str) -> None:
    said = {number: "broken" if number == rank else "good" for number in range(12)}
    assert bad_nodes(said, 12, 8, ["n1", "n2"]) == [node]


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(("fields", "words"), [
    ({"partition": "nopart"}, "cluster.partition=nopart does not exist"),
    ({"account": "poor"}, "cluster.account=poor"),
    ({"qos": "royal"}, "cluster.qos=royal"),
    ({"qos": "small", "nodes": 2, "gpus_per_node": 1}, "cluster.qos=small"),
    ({"constraint": "ib"}, "cluster.constraint=ib"),
    ({"nodelist": "n77"}, "cluster.nodelist=n77"),
    ({"gpu_request": "gres", "gpu_type": "b300"}, "gpu_type=b300"),
    ({"mem_gb": 5000.0}, "cluster.mem_gb=5000.0"),
    ({"dependency": "perhaps"}, "cluster.dependency=perhaps"),
    ({"reservation": "party"}, "cluster.reservation=party"),
    ({"extra": ["--no-such-option"]}, "cluster.extra"),
])  # fmt: skip
def test_what_slurm_refuses_is_one_plain_line_and_nothing_is_queued(
    slurm: Slurm, tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    slurm.breakable()
    with pytest.raises(ConfigError) as refused:
        run(tmp_path, trial(ranks=fields.get("nodes", 1), comment=tmp_path.name, **fields))
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [], "nothing is left of it"
    assert {state for comment, state in squeue("Comment", "State") if comment == tmp_path.name} <= {"FAILED"}


def test_what_slurm_refuses_is_pruned_and_the_rest_of_the_sweep_runs(slurm: Slurm, tmp_path: Path, python: str) -> None:
    slurm.breakable()
    good, bad = run(tmp_path, trial(python=python), trial(python=python, ranks=2, nodes=2, qos="small"))
    assert (good.status, bad.status, bad.reason) == (Status.DONE, Status.PRUNED, Reason.CONFIGURATION)
    assert "cluster.qos=small" in bad.detail


def test_nodes_that_are_down_are_no_refusal(whole: Cluster, tmp_path: Path, python: str) -> None:
    """``sbatch --test-only`` says of them what it says of nodes that do not exist; sbatch itself takes the job."""
    before = {name for (name,) in squeue("Name")}
    whole.output("scontrol", "update", "NodeName=n1,n2,n3,n4", "State=DRAIN", "Reason=test")
    sweep = Running(tmp_path, trial(python=python))
    until(lambda: [state for name, state in squeue("Name", "State") if name in submissions(tmp_path)] == ["PENDING"])
    whole.output("scontrol", "update", "NodeName=n1,n2,n3,n4", "State=RESUME")
    (record,) = sweep.ended()
    assert record.status is Status.DONE
    rehearsals = [state for name, state in squeue("Name", "State") if name.startswith("trireme-test-") and name not in before]
    assert rehearsals == ["CANCELLED"], "what Slurm refused in tests before this one stays listed as failed for a while"


@pytest.mark.parametrize(("fields", "reason", "words"), [
    ({"partition": "one", "time": 5}, Reason.CANNOT_START, "than cluster.partition allows"),
    ({"partition": "one", "nodes": 2}, Reason.CANNOT_START, "than cluster.partition allows"),
    ({"cpus": 99}, Reason.CANNOT_START, "than cluster.partition allows"),
    ({"dependency": "afterok:FAILED"}, Reason.UPSTREAM, "a job that it comes after has failed"),
])  # fmt: skip
def test_a_job_that_can_never_start_is_taken_back_and_says_why(
    slurm: Slurm, tmp_path: Path, fields: dict[str, Any], reason: Reason, words: str
) -> None:
    slurm.breakable()
    failed = subprocess.run(["sbatch", "--parsable", "--output=/dev/null", "--wrap=false"], check=True, capture_output=True, text=True)
    fields = {name: value.replace("FAILED", failed.stdout.strip()) if isinstance(value, str) else value for name, value in fields.items()}
    (record,) = run(tmp_path, trial(ranks=fields.get("nodes", 1), **fields))
    assert (record.status, record.reason) == (Status.FAILED, reason)
    assert words in record.detail
    ours = submissions(tmp_path)
    assert ours and all(state == "CANCELLED" for name, state in squeue("Name", "State") if name in ours)


def test_a_limit_of_the_quality_of_service_is_told_and_waited_for(slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One job at a time may run under it; another user of it ends when the trial has been seen to wait."""
    slurm.breakable()
    other = ["sbatch", "--parsable", "--qos=one", "--output=/dev/null", "--wrap=sleep 500"]
    job = subprocess.run(other, check=True, capture_output=True, text=True).stdout.strip()
    until(lambda: ["RUNNING"] in [row[1:] for row in squeue("JobID", "State") if row[0] == job])
    sweep = Running(tmp_path, trial(python=interpreter(tmp_path, "tests.backends.played_trainer"), qos="one"))
    (path,) = until(lambda: list(tmp_path.glob("trials/*/trial.json")))
    until(lambda: "waits: QOSMaxJobsPerUserLimit (a limit of cluster.qos" in path.read_text())
    subprocess.run(["scancel", job], check=True)
    (record,) = sweep.ended()
    assert record.status is Status.DONE
    assert "1 trial: waits: QOSMaxJobsPerUserLimit (a limit of cluster.qos" in capsys.readouterr().err


def test_a_limit_that_a_job_exceeds_alone_is_a_failure_to_start(slurm: Slurm, tmp_path: Path) -> None:
    slurm.breakable()
    (record,) = run(tmp_path, trial(qos="brief", time="5"))
    assert (record.status, record.reason) == (Status.FAILED, Reason.CANNOT_START)
    assert "cluster.qos" in record.detail and "QOSMaxWallDurationPerJobLimit" in record.detail


def test_a_drained_partition_is_named(slurm: Slurm, tmp_path: Path) -> None:
    cluster = slurm.breakable()
    cluster.output("scontrol", "update", "PartitionName=one", "State=DRAIN")
    try:
        with pytest.raises(ConfigError, match=r"cluster\.partition=one is drained"):
            run(tmp_path, trial(partition="one"))
    finally:
        cluster.output("scontrol", "update", "PartitionName=one", "State=UP")


def test_a_folder_of_trials_that_nodes_do_not_share_is_named(slurm: Slurm, tmp_path: Path, python: str) -> None:
    """A job whose script has gone by the time that it starts, as it would be for a node that does not see the folder."""
    slurm.breakable()
    sweep = Running(tmp_path, trial(python=python, extra=["--begin=now+3600"]))
    (script,) = until(lambda: list(tmp_path.glob("trials/*/logs/*.submitted.txt")))
    (name,) = until(lambda: submissions(tmp_path))
    script.unlink()
    for job in [job for job, found in squeue("JobID", "Name") if found == name]:
        subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=True)
    (record,) = sweep.ended()
    assert (record.status, record.reason) == (Status.FAILED, Reason.CANNOT_START) and "sweep.dir" in record.detail


def test_a_server_side_dry_run_prints_the_answer_of_sbatch_and_submits_nothing(slurm: Slurm, tmp_path: Path) -> None:
    mark = f"cluster.comment={tmp_path.name}"
    accepted = _train(tmp_path / "here", "--dry-run=server", mark)
    assert accepted.returncode == 0, accepted.stderr
    assert "#SBATCH --ntasks=1" in accepted.stdout and re.search(
        r"^# sbatch: Job \d+ to start at \S+ .* on nodes? n\d", accepted.stdout, re.M
    )
    refused = _train(tmp_path / "here", "--dry-run=server", "cluster.partition=nosuch", mark)
    words = "cluster.partition=nosuch does not exist"
    assert refused.returncode == 2 and words in refused.stderr and f"# refused: Slurm refused the job: {words}" in refused.stdout
    assert [tmp_path.name] not in squeue("Comment")
    assert not list((tmp_path / "here").glob("runs/*"))


def test_without_slurm_the_machine_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no sbatch; run this on a login node"):
        SlurmBackend(CLUSTER).check()


def test_a_missing_slurm_conf_is_said_at_once(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", "/no/such/slurm.conf")
    with pytest.raises(ConfigError, match=r"SLURM_CONF=/no/such/slurm\.conf does not exist"):
        SlurmBackend(CLUSTER).check()


# ---------------------------------------------------------------- secrets


def _train(folder: Path, *overrides: str, process: Any = warm.run, **variables: str) -> subprocess.CompletedProcess[str]:
    """A training by the command line, from a folder of its own."""
    folder.mkdir(exist_ok=True)
    model = ["data=synthetic", "model.layers=1", "model.hidden=16", "model.heads=2", "model.seq=8"]
    small = ["run.steps=2", "run.warmup_steps=0", "run.global_batch=2"]
    cluster = ["cluster=slurm", "cluster.gpus_per_node=1", "cluster.gpu_request=none", "cluster.code=image", "cluster.poll_seconds=0.2"]
    words = ["-m", "launcher", "train", *model, *small, *cluster, *overrides]
    done: subprocess.CompletedProcess[str] = process(*words, cwd=folder, env=os.environ | variables)
    return done


def _cold(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A process that copies its sweep into MLflow, as those that are forked do not."""
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)


def _holders(folder: Path, *words: str) -> list[Path]:
    """Files that hold one of ``words``."""
    found = []
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError, IsADirectoryError):  # MLflow is still being written
            content = path.read_bytes()
            found += [path] if any(word.encode() in content for word in words) else []
    return found


def test_secrets_by_reference_reach_the_ranks_and_stand_in_no_file(slurm: Slurm, tmp_path: Path) -> None:
    """Launcher and rank are processes of their own kind: nothing here is forked."""
    secrets, told = tmp_path / "secrets", tmp_path / "python"
    secrets.write_text("FILE_TOKEN=planted-one\n")
    secrets.chmod(0o600)
    told.write_text(f'#!/bin/sh\nprintf %s "$FILE_TOKEN $SHELL_TOKEN" | sha256sum\nexec {sys.executable} "$@"\n')
    told.chmod(0o755)
    references = [f"cluster.env_from={secrets}", "cluster.env_inherit=[SHELL_TOKEN]", f"cluster.python={told}"]
    done = _train(tmp_path / "here", *references, process=_cold, SHELL_TOKEN="planted-two")
    assert done.returncode == 0, done.stderr
    (log,) = (tmp_path / "here").glob("runs/trials/*/logs/attempt0.rank0.log")
    assert hashlib.sha256(b"planted-one planted-two").hexdigest() in log.read_text()
    in_mlflow = tmp_path / "here/runs/mlflow.db"
    until(lambda: in_mlflow.exists() and in_mlflow in _holders(in_mlflow.parent, log.parents[1].name))
    assert _holders(tmp_path / "here", "planted-one", "planted-two") == []
    assert "planted" not in done.stdout + done.stderr


def test_a_secret_in_clear_is_refused_and_stands_in_no_file(slurm: Slurm, tmp_path: Path) -> None:
    refused = _train(tmp_path / "here", "cluster.env.HF_TOKEN=planted")
    assert refused.returncode == 2 and "cluster.env.HF_TOKEN" in refused.stderr and "cluster.env_from" in refused.stderr
    assert _holders(tmp_path / "here", "planted") == [] and "planted" not in refused.stdout + refused.stderr


@pytest.mark.parametrize(("name", "words"), [
    ("NO_SUCH_TOKEN", "names NO_SUCH_TOKEN, which is not set here"), ("SLURM_CPU_BIND", "has SLURM_CPU_BIND, which no job takes along"),
    ("x; rm y", "has 'x; rm y', which cannot name an environment variable"),
])  # fmt: skip
def test_a_variable_that_cannot_be_inherited_is_named(slurm: Slurm, tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^cluster\.env_inherit {words}"):
        run(tmp_path, trial(env_inherit=[name]))
    assert not list(tmp_path.iterdir()), "nothing is written"


# ---------------------------------------------------------------- code


def test_a_queued_job_runs_the_code_that_was_there_at_submission(slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The snapshot holds the whole checkout, byte for byte, and the ranks import the trainer from it; status says if it has changed."""
    where = tmp_path / "python"
    where.write_text(f'#!/bin/sh\nexec {sys.executable} -P -c "import trainer; print(trainer.__file__)"\n')
    where.chmod(0o755)
    (record,) = run(tmp_path, trial(python=str(where), code="snapshot"))
    assert record.handle is not None
    snapshot = tmp_path / "code" / record.handle["code"]
    assert (record.directory / "logs/attempt0.rank0.log").read_text().strip() == str(snapshot / "trainer" / "__init__.py")
    assert [path.name for path in snapshot.iterdir()] == ["trainer"]
    assert "code has changed" not in _status(tmp_path, capsys)
    kept = record.directory / "trial.json"
    kept.write_text(kept.read_text().replace(snapshot.name, "0" * 12))
    assert f"the code has changed since these jobs were submitted: diff -r {tmp_path / 'code' / ('0' * 12)}" in _status(tmp_path, capsys)


def _status(runs: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert status.main(["--dir", str(runs)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("command", "refused", "passed_on"), [("sbatch", SBATCH, PASSED_ON), ("srun", SRUN, SRUN_PASSED_ON)])
def test_every_option_of_this_slurm_is_refused_with_a_reason_or_passed_on(
    slurm: Slurm, command: str, refused: dict[str, str], passed_on: set[str]
) -> None:
    told = subprocess.run([command, "--help"], capture_output=True, text=True, check=True).stdout
    options = set(re.findall(r"^ +(?:-\w, )?--([a-z][a-z0-9-]+)", told, re.MULTILINE))
    assert len(options) > 50 and not set(refused) & passed_on
    assert not {option for option in options - set(refused) - passed_on if not option.startswith(("container", "no-container"))}
