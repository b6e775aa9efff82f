"""What an API server refuses: each answer, as real servers (1.20 and 1.36) word it, becomes one plain sentence. No cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launcher.backends.kubernetes.errors import ApiError, dropped, explain, explain_refusal, from_answer
from launcher.backends.kubernetes.submission import Submission
from launcher.backends.kubernetes.workloads import KINDS

TEMPLATE = "spec.template: Invalid value: {" + "core.PodTemplateSpec{ObjectMeta:v1.ObjectMeta{Name:} " * 60 + "}: field is immutable"
NAME = 'metadata.name: Invalid value: "Bad_Name": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters'
LIMITS = "Required value: Limit must be set for non overcommitable resources"


def answer(status: int, reason: str, message: str, **details: Any) -> ApiError:
    return from_answer(status, json.dumps({"kind": "Status", "reason": reason, "message": message, "details": details}))


def field_causes(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"field": field, "message": message} for field, message in pairs]


ROWS = {
    "exists": (answer(409, "AlreadyExists", 'jobs.batch "idx" already exists'), "already exists; another object of this name is in the way; delete it"),
    "conflict": (answer(409, "Conflict", "the object has been modified"), "has been modified"),
    "no namespace": (answer(404, "NotFound", 'namespaces "no-such-ns" not found', name="no-such-ns"), "namespace trials does not exist; create it with 'kubectl create namespace trials'"),
    "no such kind": (answer(404, "NotFound", "the server could not find the requested resource"), "does not know this kind of object; install it, or choose another cluster.workload"),
    "gone": (answer(404, "NotFound", 'pods "nope" not found', name="nope"), 'pods "nope" not found; it may have been deleted'),
    "rbac": (
        answer(403, "Forbidden", 'jobs.batch is forbidden: User "launcher" cannot create resource "jobs" in API group "batch" in the namespace "probe"'),
        "user launcher may not create jobs.batch in namespace trials; have it granted: deploy/kubernetes/rbac.yaml",
    ),
    "rbac, cluster-wide": (answer(403, "Forbidden", 'nodes is forbidden: User "launcher" cannot list resource "nodes" at the cluster scope'), "user launcher may not list nodes"),
    "quota": (
        answer(403, "Forbidden", 'pods "big" is forbidden: exceeded quota: rq, requested: requests.cpu=5, used: requests.cpu=0, limited: requests.cpu=4'),
        "quota is used up (pods \"big\" is forbidden: exceeded quota: rq, requested: requests.cpu=5, used: requests.cpu=0, limited: requests.cpu=4); wait, lower sweep.max_parallel",
    ),
    "quota wants requests": (answer(403, "Forbidden", 'pods "noreq" is forbidden: failed quota: rq: must specify requests.cpu for: w'), "set cluster.cpu and cluster.memory"),
    "limit range": (answer(403, "Forbidden", 'pods "lr" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi'), "limit range forbids the pods (pods \"lr\" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi); change cluster.cpu or cluster.memory"),
    "pod security": (answer(403, "Forbidden", 'pods "psa" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false (container "w" must set ...)'), "set cluster.restricted=true"),
    "terminating": (answer(403, "Forbidden", 'pods "late" is forbidden: unable to create new content in namespace probe because it is being terminated'), "namespace trials is being deleted; wait until it is gone"),
    "another refusal": (answer(403, "Forbidden", 'admission webhook "policy" denied the request: no images from here'), "no images from here; ask the cluster's administrator"),
    "bad token": (answer(401, "Unauthorized", "Unauthorized"), "does not accept the credentials; log in again"),
    "bad name": (answer(422, "Invalid", f'Pod "Bad_Name" is invalid: {NAME}', causes=field_causes(("metadata.name", NAME.partition(": ")[2]))), 'metadata.name: Invalid value: "Bad_Name": a lowercase'),
    "immutable": (answer(422, "Invalid", f'Job.batch "idx" is invalid: {TEMPLATE}', causes=field_causes(("spec.template", TEMPLATE.partition(": ")[2]))), "spec.template: Invalid value: ...: field is immutable; correct"),
    "gpu without limit": (answer(422, "Invalid", "...", causes=field_causes(("spec.containers[0].resources.limits", LIMITS))), f"spec.containers[0].resources.limits: {LIMITS}; correct the cluster's settings"),
    "half a gpu": (answer(422, "Invalid", "...", causes=field_causes(("a", "must be an integer"), ("a", "must be an integer"), ("b", "bad"))), "a: must be an integer and b: bad; correct"),
    "quantity": (
        answer(400, "BadRequest", 'Pod in version "v1" cannot be handled as a Pod: quantities must match the regular expression \'^([+-]?[0-9.]+)$\''),
        "quantities must match the regular expression '^([+-]?[0-9.]+)$'; correct the cluster's settings (quantities look like 4, 500m, 64Gi)",
    ),
    "quantity, 1.20": (
        answer(400, "BadRequest", 'Pod in version "v1" cannot be handled as a Pod: v1.Pod.Spec: v1.PodSpec.Containers: []v1.Container: v1.Container.Resources: quantities must match the regular expression, error found in #10 byte of ...|"1x"}},"x|..., bigger context ...|a lot|...'),
        "quantities must match the regular expression; correct",
    ),
    "unknown field, strict": (answer(400, "BadRequest", 'strict decoding error: unknown field "spec.completionmode"'), 'unknown field "spec.completionmode"; correct'),
    "restart policy": (answer(422, "Invalid", "...", causes=field_causes(("spec.template.spec.restartPolicy", 'Required value: valid values: "OnFailure", "Never"'))), 'spec.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"; correct'),
    "indexed without completions": (answer(422, "Invalid", "...", causes=field_causes(("spec.completions", "Required value: when completion mode is Indexed"))), "spec.completions: Required value: when completion mode is Indexed; correct"),
    "too long a name": (
        answer(422, "Invalid", "...", causes=field_causes(("metadata.name", 'Invalid value: "' + "x" * 62 + '": will not able to create pod with invalid DNS label: NAME-199'))),
        "metadata.name: Invalid value: \"" + "x" * 62 + '": will not able to create pod with invalid DNS label: NAME-199; correct',
    ),
    "wrong type": (
        answer(400, "BadRequest", 'Job in version "v1" cannot be handled as a Job: json: cannot unmarshal string into Go struct field JobSpec.spec.completions of type int32'),
        "cannot submit trial 0123: json: cannot unmarshal string into Go struct field JobSpec.spec.completions of type int32; correct",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_every_refusal_is_one_plain_sentence_with_cause_and_remedy(name: str) -> None:
    error, words = ROWS[name]
    said = explain(error, "submit trial 0123", "trials")
    assert said.startswith("cannot submit trial 0123: ") and words in said
    assert "\n" not in said and len(said) < 500 and "; " in said


@pytest.mark.parametrize(
    ("error", "trait"),
    [
        (answer(409, "AlreadyExists", ""), "exists"),
        (answer(404, "NotFound", ""), "absent"),
        (answer(409, "Conflict", "Precondition failed: the UID in the precondition (a) does not match the UID in record (b)"), "absent"),
        (answer(410, "Expired", "too old resource version"), "expired"),
        (answer(409, "Conflict", 'Operation cannot be fulfilled on resourcequotas "rq": the object has been modified'), "busy"),
        (answer(429, "TooManyRequests", ""), "busy"),
        (answer(500, "InternalError", "etcdserver: leader changed"), "busy"),
        (answer(500, "", "rpc error: code = Unavailable desc = transport is closing"), "busy"),
        (from_answer(502, "<html>\n<body>bad gateway"), "busy"),
        (answer(504, "Timeout", "request did not complete within requested timeout"), "busy"),
        (answer(401, "Unauthorized", "Unauthorized"), "unauthorized"),
        (
            answer(403, "Forbidden", 'pods is forbidden: User "u" cannot list resource "pods" in API group "" in the namespace "n"'),
            "unauthorized",
        ),
        (from_answer(500, "{}", "1"), "busy"),
        (answer(500, "ServerTimeout", ""), "busy"),
        (from_answer(503, "apiserver is shutting down"), "busy"),
        (answer(403, "Forbidden", "exceeded quota: rq"), "over_quota"),
    ],
)
def test_what_can_be_done_about_an_answer_is_told_from_its_content(error: ApiError, trait: str) -> None:
    traits = {"exists", "absent", "expired", "busy", "unauthorized", "over_quota"}
    assert {name for name in traits if getattr(error, name)} == {trait}


def test_an_answer_that_asks_for_patience_says_how_long() -> None:
    assert from_answer(429, "{}", "7").retry_after == 7.0
    assert from_answer(429, "{}", "Fri, 20 Nov 2026 12:00:00 GMT").retry_after is None


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ('pods "j-0-x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true', "set cluster.restricted=true"),
        ('pods "j-0-x" is forbidden: failed quota: rq: must specify requests.cpu', "set cluster.cpu and cluster.memory"),
        ('pods "j-0-x" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi', "change cluster.cpu or cluster.memory"),
        (
            'pods "j-0-x" is forbidden: error looking up service account t/trainer: serviceaccount "trainer" not found',
            "cluster.service_account",
        ),
        ('pods "j-0-x" is forbidden: no PriorityClass with name high was found', "cluster.priority_class"),
    ],
)
def test_refusals_of_pods_say_what_to_do_whether_the_launcher_or_a_controller_makes_them(message: str, words: str) -> None:
    said = (
        explain(answer(403, "Forbidden", message), "submit trial 0123", "trials"),
        explain_refusal(f"Error creating: {message}", "trials"),
    )
    for sentence in said:
        assert words in sentence and "; " in sentence and "\n" not in sentence and "Error creating" not in sentence


# -- fields that an old server forgets ---------------------------------------------------------------------------------------------


def test_forgotten_fields_are_named_by_their_path() -> None:
    sent = {
        "spec": {
            "completionMode": "Indexed",
            "completions": 2,
            "suspend": True,
            "template": {"spec": {"containers": [{"name": "a", "x": 1}]}},
        }
    }
    stored = {"spec": {"completions": 2, "template": {"spec": {"containers": [{"name": "a"}]}}}, "status": {}}
    assert sorted(dropped(sent, stored)) == ["spec.completionMode", "spec.suspend", "spec.template.spec.containers.0.x"]


@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        ({"suspend": False, "readOnly": False, "labels": {}, "n": 0, "s": "", "l": [], "x": None}, {}),
        ({"cpu": "1000m"}, {"cpu": "1", "defaulted": "yes"}),
        ({"containers": [{"name": "node", "image": "a"}]}, {"containers": [{"name": "injected"}, {"name": "node", "image": "mirror/a"}]}),
        ({"suspend": True}, {"suspend": False}),
    ],
)
def test_normalised_defaulted_and_rewritten_values_are_not_forgotten(sent: Any, stored: Any) -> None:
    assert dropped(sent, stored) == []


def test_a_shorter_list_has_forgotten_something() -> None:
    assert dropped({"a": [1, 2]}, {"a": [1]}) == ["a"]


def test_a_strict_server_names_the_fields_that_it_does_not_know() -> None:
    two = 'strict decoding error: unknown field "spec.suspend", unknown field "spec.template.spec.nodename"'
    assert answer(400, "BadRequest", two).unknown == {"spec.suspend", "spec.template.spec.nodename"}
    assert answer(400, "BadRequest", 'unknown field "spec.suspend"').unknown == set()


class StrictServer:
    """A client of a server that refuses some fields when it is asked to be strict, and else drops them."""

    def __init__(self, *unknown: str) -> None:
        self.unknown, self.asked = unknown, list[bool]()

    def create(self, path: str, manifest: dict[str, Any], dry_run: bool = False, strict: bool = True) -> dict[str, Any]:
        self.asked.append(strict)
        if strict and self.unknown:
            raise answer(400, "BadRequest", "strict decoding error: " + ", ".join(f'unknown field "{name}"' for name in self.unknown))
        return manifest


@pytest.mark.parametrize(
    ("unknown", "asked"),
    [((), [True]), (("spec.ttlSecondsAfterFinished",), [True, False]), (("spec.suspend", "spec.ttlSecondsAfterFinished"), [True, False])],
)
def test_a_server_that_refuses_later_fields_of_ours_is_asked_to_drop_them(unknown: tuple[str, ...], asked: list[bool]) -> None:
    server: Any = StrictServer(*unknown)
    assert Submission(server, KINDS["job"], 0.0)._create("a path", {"kind": "Job"}) == {"kind": "Job"}
    assert server.asked == asked


def test_a_server_that_refuses_a_slip_is_not_asked_again() -> None:
    server: Any = StrictServer("spec.suspend", "spec.template.spec.nodename")
    with pytest.raises(ApiError, match="nodename"):
        Submission(server, KINDS["job"], 0.0)._create("a path", {"kind": "Job"})
    assert server.asked == [True]
