"""Logs that cannot be read for a while, or not any more, from a real API server whose nodes are played: nothing of them is lost unsaid."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.backends.contract import BackendError
from launcher.backends.kubernetes import client, logs
from launcher.backends.kubernetes.client import Unreachable
from launcher.trials.outcome import decide
from tests.clusters.kubernetes.stage import RESULT, Gang, Stage, frame, log
from tests.clusters.slurm.process import wait_for
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.files import read_json

STEPS = [f'{{"step": {n}, "attempt": 0}}' for n in range(1, 41)]
WHOLE = log(*(f"#trireme metrics.jsonl + {step}" for step in STEPS), "[{index}] all done", frame("result.json", RESULT))
ALONE = {"nodes": 1, "gpus_per_node": 2}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits a moment, or a minute, in earnest."""
    monkeypatch.setattr(logs, "_REFUSED_SECONDS", 0.05)
    monkeypatch.setattr(logs, "_AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(client, "_LOG_TIMEOUT", (5.0, 0.5))
    monkeypatch.setattr("launcher.backends.kubernetes.backend._LOG_SECONDS", 0.2)


def collected(gang: Gang) -> bool:
    try:
        gang.backend.collect(gang.job, gang.handle)
    except BackendError:
        return False
    return True


def steps(gang: Gang) -> list[str]:
    path = gang.job.directory / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    "answers",
    [" ".join(["404"] * 8), "mute", pytest.param("mute 404 words 404 empty", marks=pytest.mark.campaign("kubernetes"))],
    ids=["404", "mute", "all of it"],
)
def test_a_log_that_cannot_be_read_for_a_while_comes_home_whole(stage: Stage, answers: str) -> None:
    """As when a kubelet has been restarted, or a connection is dead and nobody says so. The pod has ended long before."""
    gang = stage.submit({"log": WHOLE, "answers": answers}, **ALONE)
    assert gang.end().status is Status.DONE
    wait_for(lambda: collected(gang), "its log to come home")
    assert steps(gang) == STEPS and read_json(gang.job.directory / "result.json") == RESULT
    assert gang.job.log_path(0).read_text() == "all done\n", "and no word of a kubelet's"
    wait_for(lambda: not stage.left(), "the namespace to be empty")


def test_a_full_disk_of_the_launcher_costs_no_line(stage: Stage) -> None:
    gang = stage.submit({"log": WHOLE}, **ALONE)
    metrics = gang.job.directory / "metrics.jsonl"
    metrics.symlink_to("/dev/full")
    gang.end()
    with pytest.raises(BackendError, match=r"cannot be written \(No space left on device\)|it is being read"):
        gang.backend.collect(gang.job, gang.handle)
    metrics.unlink()
    wait_for(lambda: collected(gang), "its log to come home")
    assert steps(gang) == STEPS


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ({"log": WHOLE, "answers": " ".join(["404"] * 10_000)}, "0 lines, and not the last one, have come of the log of pod"),
        ({"log": log("[0] cut off").replace("end 1", "end 42")}, "1 of 42 lines have come of the log of pod"),
        pytest.param({"log": ""}, "0 lines, and not the last one, have come of the log of pod", marks=pytest.mark.campaign("kubernetes")),
    ],
    ids=["out of reach", "rotated", "empty"],
)
def test_a_trial_whose_log_stays_incomplete_is_not_measured_and_nothing_of_it_is_removed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, annotations: dict[str, str], words: str
) -> None:
    """Though its ranks went well, and the termination message has the result."""
    gang = stage.submit(annotations | {"message": json.dumps({"file": "result.json", "content": RESULT})}, **ALONE)
    state = gang.end()
    if "answers" in annotations:
        with pytest.raises(BackendError, match=f"its log is not whole yet: cannot read the log of pod {gang.pod()}|it is being read"):
            gang.backend.collect(gang.job, gang.handle)
        assert len(stage.left()) == 3 and not (gang.job.directory / "result.json").exists()
    monkeypatch.setattr(logs, "_PATIENCE", 0.1)
    wait_for(lambda: collected(gang), "the log to be given up")
    verdict = decide(0, state, read_json(gang.job.directory / "result.json"))
    assert (verdict.status, verdict.reason) == (Status.FAILED, Reason.NODE) and words in verdict.detail, verdict
    assert f"'kubectl delete service {gang.handle['name']}'" in verdict.detail and len(stage.left()) == 3
    assert words in gang.job.log_path(0).read_text(), "the log says that it breaks off"


def test_a_pod_whose_log_was_lost_costs_no_measurement_that_another_pod_has_sent_whole(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_PATIENCE", 0.5)
    gang = stage.submit({"log": WHOLE, "answers": "1=" + " ".join(["404"] * 10_000)})
    state = gang.end()
    wait_for(lambda: collected(gang), "the log to be given up")
    assert decide(0, state, read_json(gang.job.directory / "result.json")).status is Status.DONE and steps(gang) == STEPS
    assert "0 lines, and not the last one, have come" in gang.job.log_path(1).read_text()
    wait_for(lambda: not stage.left(), "the namespace to be empty")


@pytest.mark.campaign("kubernetes")
def test_a_pod_that_is_removed_with_its_log_was_not_measured(stage: Stage) -> None:
    gang = stage.submit({"log": WHOLE, "answers": " ".join(["404"] * 10_000)}, **ALONE)
    gang.end()
    stage.kubernetes.core().delete_namespaced_pod(gang.pod(), stage.namespace, grace_period_seconds=0)
    wait_for(lambda: collected(gang), "the log to be given up")
    result = read_json(gang.job.directory / "result.json") or {}
    assert (result["status"], result["reason"]) == ("failed", "node") and result["message"].endswith("the pod is gone")
    wait_for(lambda: not stage.left(), "the namespace to be empty")


class Node:
    """A client whose server answers with ``answers``, one after the other and the last one for ever, to whoever reads the log."""

    def __init__(self, *answers: list[str]):
        self.namespace, self._answers = "test", list(answers)

    def log(self, pod: str, container: str, since: str | None, follow: bool) -> Iterator[bytes]:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        yield from (line.encode() for line in answer)
        if self._answers[1:]:
            raise Unreachable("the connection broke off")

    def get(self, path: str, name: str) -> Any:
        return POD | {"status": {"containerStatuses": [{"name": "node", "state": {"terminated": {"exitCode": 0}}}]}}

    def now(self) -> float:
        return 0.0


POD: dict[str, Any] = {"metadata": {"name": "pod-0", "uid": "0"}, "spec": {}}


@pytest.mark.parametrize("second", [7, 3, 1], ids=["as it goes", "the same moment", "set back"])
def test_a_log_arrives_whole_whatever_the_clock_of_its_node_does_while_a_stream_breaks_off(tmp_path: Path, second: int) -> None:
    first = [f"2026-11-20T10:00:0{n}Z {line}" for n, line in ((2, "#trireme begin"), (3, "[0] one"))]
    rest = [f"2026-11-20T10:00:0{second}Z {line}" for line in ("[0] two", "#trireme metrics.jsonl + {}", "#trireme end 3")]
    follower = logs.Follower(Node(first, [*first, *rest[:1]], first + rest), POD, tmp_path, 0, lambda: True)  # type: ignore[arg-type]
    follower.start()
    follower.join(60)
    assert not follower.is_alive() and not follower.missing
    assert (tmp_path / "logs/attempt0.rank0.log").read_text() == "one\ntwo\n" and (tmp_path / "metrics.jsonl").read_text() == "{}\n"


def test_what_is_left_of_an_earlier_attempt_writes_nothing_into_a_later_one(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/attempt1.rank0.log").touch()
    (tmp_path / "metrics.jsonl").write_text("of the later one\n")
    node = Node(["2026-11-20T10:00:00Z #trireme metrics.jsonl + {}"])
    follower = logs.Follower(node, POD, tmp_path, 0, lambda: True)  # type: ignore[arg-type]
    follower.start()
    follower.join(60)
    assert not follower.is_alive() and (tmp_path / "metrics.jsonl").read_text() == "of the later one\n"
