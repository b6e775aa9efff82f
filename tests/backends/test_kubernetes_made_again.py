"""A pod that a queue took away and made again is one pod of its gang."""

from __future__ import annotations

from typing import Any

from launcher.backends.kubernetes.causes import Object
from launcher.backends.kubernetes.states import Observed, state_of
from launcher.backends.kubernetes.workloads import KINDS
from trainer.shared.records.outcome import Status


def pod(index: int, uid: str, created: str, **state: Any) -> Object:
    head = {"name": f"j-{index}", "uid": uid, "creationTimestamp": created}
    status = {"phase": "Running", "containerStatuses": [{"name": "node", "state": state}]}
    return {"metadata": head, "spec": {"hostname": f"j-{index}", "nodeName": f"n-{uid}"}, "status": status}


def test_a_pod_that_was_made_again_counts_once() -> None:
    began = {"startedAt": "2026-11-20T11:00:00Z"}
    over = began | {"exitCode": 0, "finishedAt": "2026-11-20T11:10:00Z"}
    gone, again = pod(0, "gone", "2026-11-20T10:59:00Z", terminated=over), pod(0, "again", "2026-11-20T11:59:00Z", running=began)
    workload = {"metadata": {"name": "j"}, "spec": {}, "status": {}}
    gang = Observed(2, {"metadata": {"name": "j"}}, workload, [again, gone], gone=frozenset({"gone"}))
    told = state_of(KINDS["job"], gang, 1795000000.0, 300.0)
    assert (told.status, told.nodes) == (Status.SUBMITTED, ("n-again",))
    assert told.detail.startswith("1 of 2 pods run")
