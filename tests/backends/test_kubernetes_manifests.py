"""Manifests: golden files of every workload, strict schemas, and what each setting does. No cluster, but for one test.

After a wanted change: python -m tests.backends.test_kubernetes_manifests
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.backends.kubernetes.cluster import KubernetesCluster, check_cluster
from launcher.backends.kubernetes.errors import dropped
from launcher.backends.kubernetes.manifests import PROGRAMS, Manifest, launcher_job, merge, object_name, pods_of
from launcher.backends.kubernetes.provision import digest
from launcher.backends.kubernetes.volumes import VolumeConfig
from launcher.backends.kubernetes.workloads import KINDS, from_text, render, to_text
from launcher.config.schema import Config, ContainerConfig
from launcher.trials.job import Job
from tests.clusters.kubernetes.fixture import Kubernetes
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict, to_dict

PROJECT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("golden") / "kubernetes"
CURRENT = "1.36"
"""The Kubernetes whose schemas the manifests must satisfy."""
CONFIG = "model:\n  layers: 2\n"
PLAIN = KubernetesCluster(backend="kubernetes", nodes=2, gpus_per_node=8, container=ContainerConfig(image="trireme:1"))
FULL = dataclasses.replace(
    PLAIN,
    container=ContainerConfig(image="registry.example/trireme:1", mounts=["/local/cache:/cache:ro"]),
    env={"NCCL_DEBUG": "WARN"},
    namespace="research",
    queue="team-a",
    queue_priority="sweeps",
    topology="cloud/rack",
    service_account="trainer",
    pull_secrets=["registry"],
    node_selector={"gpu": "h100"},
    tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    affinity={"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    rdma_resource="rdma/ib",
    rdma_count=8,
    cpu="96",
    memory="1000Gi",
    volumes=[VolumeConfig(mount="/runs", claim="runs"), VolumeConfig(mount="/data", nfs="filer:/data", read_only=True)],
    run_dir="/runs/trials",
    secrets={"MLFLOW_TRACKING_TOKEN": "mlflow/token"},
    labels={"cost-centre": "42"},
    annotations={"contact": "team-a"},
)  # fmt: skip


def job(cluster: KubernetesCluster = PLAIN, world_size: int = 16, **fields: Any) -> Job:
    return Job("0123456789ab", "layouts", 0, Path("/home/a/runs/trials/0123456789ab"), cluster, world_size, **fields)


NAME = object_name(job())


def rendered(cluster: KubernetesCluster = PLAIN, world_size: int = 16, **fields: Any) -> list[Manifest]:
    return render(job(cluster, world_size, **fields), check_cluster(cluster), CONFIG)


def pod_of(objects: list[Manifest]) -> Manifest:
    """The pod specification in a rendered Job or Pod."""
    spec = objects[2]["spec"]
    found: Manifest = spec["template"]["spec"] if "template" in spec else spec
    return found


def variant(workload: str, full: bool) -> KubernetesCluster:
    """FULL, without what the workload cannot express."""
    if not full:
        return dataclasses.replace(PLAIN, workload=workload)
    without = {"volcano": {"queue_priority": None, "topology": None}}.get(workload, {})
    return dataclasses.replace(FULL, workload=workload, **without)


CASES = [(workload, full) for workload in KINDS for full in (False, True)]


def golden_text(workload: str, full: bool) -> str:
    """Programs and code in the ConfigMap are left out: they have tests of their own."""
    objects = rendered(variant(workload, full))
    for program in PROGRAMS:
        objects[1]["data"][program.name] = f"(launcher/backends/kubernetes/{program.name})"
    objects[1]["binaryData"]["trainer.tar.gz"] = "(trainer)"
    # Before it is YAML, which quotes a digest that begins with a digit.
    return to_text(json.loads(json.dumps(objects).replace(digest(PROJECT / "trainer"), "(its digest)")))


def golden_path(workload: str, full: bool) -> Path:
    return GOLDEN / f"{workload}-{'full' if full else 'plain'}.yaml"


@pytest.mark.parametrize(("workload", "full"), CASES)
def test_manifests_are_those_of_the_golden_files(workload: str, full: bool) -> None:
    assert golden_text(workload, full) == golden_path(workload, full).read_text()


@pytest.mark.parametrize(("workload", "full"), CASES)
def test_what_is_printed_is_what_is_sent(workload: str, full: bool) -> None:
    objects = rendered(variant(workload, full))
    assert from_text(to_text(objects)) == objects


@pytest.mark.parametrize(("workload", "full"), CASES)
def test_every_object_satisfies_the_strict_schema_of_a_current_kubernetes(workload: str, full: bool) -> None:
    for manifest in rendered(variant(workload, full)):
        if manifest["apiVersion"] in ("v1", "batch/v1"):
            kubernetes_validate.validate(manifest, CURRENT, strict=True)
        else:
            assert manifest["kind"] == KINDS[workload].kind


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("workload", ["jobset", "trainjob"])
def test_no_field_of_a_jobset_or_trainjob_is_unknown_to_its_makers(workload: str, full: bool) -> None:
    from kubeflow_trainer_api import models

    model = {"jobset": models.JobsetV1alpha2JobSet, "trainjob": models.TrainerV1alpha1TrainJob}[workload]
    manifest = rendered(variant(workload, full))[2]
    assert dropped(manifest, model.from_dict(manifest).to_dict()) == []
    manifest["spec"]["suspended"] = True
    assert dropped(manifest, model.from_dict(manifest).to_dict()) == ["spec.suspended"]


def test_the_restricted_pod_security_standard_is_met_by_default() -> None:
    pod = pod_of(rendered())
    container = pod["containers"][0]["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container == {"capabilities": {"drop": ["ALL"]}, "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
    assert pod["automountServiceAccountToken"] is False


@pytest.mark.parametrize(("world_size", "pods", "gpus"), [(16, 2, "8"), (8, 1, "8"), (2, 1, "2"), (12, 2, "8")])
def test_a_layout_gets_as_many_pods_as_it_needs_nodes(world_size: int, pods: int, gpus: str) -> None:
    cluster = dataclasses.replace(PLAIN, workload="job")
    spec = rendered(cluster, world_size)[2]["spec"]
    assert (spec["completions"], spec["parallelism"], pods_of(job(cluster, world_size))) == (pods, pods, pods)
    assert spec["template"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": gpus}


def test_every_pod_of_every_workload_finds_pod_0_by_a_name_that_its_kind_gives_to_pod_0() -> None:
    hosts = {}
    for workload in KINDS:
        text = to_text(rendered(variant(workload, False)))
        hosts[workload] = text.partition("name: MASTER_ADDR\n")[2].split("value: ")[1].split("\n")[0]
    name, rest = NAME, f"{NAME}.trireme.svc"
    assert hosts == {
        "job": f"{name}-0.{rest}",
        "pods": f"{name}-0.{rest}",
        "jobset": f"{name}-node-0-0.{rest}",
        "trainjob": f"{name}-node-0-0.{rest}",
        "volcano": f"{name}-node-0.{rest}",
    }


def test_names_of_pods_stay_dns_labels_for_a_thousand_nodes() -> None:
    cluster = dataclasses.replace(PLAIN, workload="pods", nodes=1000, gpus_per_node=1)
    objects = rendered(cluster, 1000)
    assert len(objects) == 1002
    assert max(len(o["metadata"]["name"]) for o in objects) <= 63


def test_all_of_a_job_but_its_root_can_be_told_by_its_labels() -> None:
    labels = {tuple(sorted(o["metadata"]["labels"].items())) for o in rendered(dataclasses.replace(PLAIN, workload="pods"))}
    assert len(labels) == 1
    assert dict(labels.pop()).items() >= {
        ("app.kubernetes.io/managed-by", "trireme"), ("trireme/job", NAME), ("trireme/sweep", "layouts"),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["a" * 64, "ends-with-", "dots...", "x" * 62 + "-y"])
def test_any_name_of_a_sweep_makes_a_valid_label(name: str) -> None:
    label = render(dataclasses.replace(job(), sweep=name), PLAIN, CONFIG)[0]["metadata"]["labels"]["trireme/sweep"]
    assert 0 < len(label) <= 63 and label[-1].isalnum()


@pytest.mark.parametrize("workload", KINDS)
def test_no_object_of_a_trial_has_the_name_or_the_labels_of_the_same_trial_of_another_folder(workload: str) -> None:
    """In one namespace two people measure the layouts of the same README."""
    other = dataclasses.replace(job(), directory=Path("/home/b/runs/trials/0123456789ab"))
    here, there = (render(j, variant(workload, False), CONFIG) for j in (job(), other))
    for mine, theirs in zip(here, there, strict=True):
        assert mine["metadata"]["name"] != theirs["metadata"]["name"]
        assert all(mine["metadata"]["labels"][label] != theirs["metadata"]["labels"][label] for label in ("trireme/store", "trireme/job"))


def test_nodes_that_were_at_fault_are_shunned_without_a_demand_that_may_be_impossible() -> None:
    own = {"weight": 1, "preference": {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100"]}]}}
    terms = [{"matchExpressions": [{"key": "gpu", "operator": "In", "values": [kind]}]} for kind in ("a100", "h100")]
    affinity = {"nodeAffinity": {PREFERRED: [own], REQUIRED: {"nodeSelectorTerms": terms}}}
    out = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n3"]}]}
    for chosen, before in ((dataclasses.replace(PLAIN, affinity=affinity), affinity["nodeAffinity"]), (PLAIN, {})):
        found = pod_of(rendered(chosen, avoid=("n3",)))["affinity"]["nodeAffinity"]
        assert found[PREFERRED] == [*before.get(PREFERRED, []), {"weight": 100, "preference": out}]
        assert found.get(REQUIRED) == before.get(REQUIRED)


PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


@pytest.mark.parametrize("workload", KINDS)
def test_every_pod_of_a_trial_gets_a_node_of_its_own_unless_told_otherwise(workload: str) -> None:
    apart = {"labelSelector": {"matchLabels": {"trireme/job": NAME}}, "topologyKey": "kubernetes.io/hostname"}
    cluster = dataclasses.replace(PLAIN, workload=workload)
    assert [terms[REQUIRED] for terms in found("podAntiAffinity", rendered(cluster))] in ([[apart]], [[apart]] * 2)
    assert found("podAntiAffinity", rendered(dataclasses.replace(cluster, spread=False))) == []
    own = {"podAntiAffinity": {REQUIRED: [{"topologyKey": "rack"}], "preferredDuringSchedulingIgnoredDuringExecution": []}}
    both = found("podAntiAffinity", rendered(dataclasses.replace(cluster, affinity=own)))[0]
    assert both[REQUIRED] == [{"topologyKey": "rack"}, apart] and len(both) == 2, "a site's own demands stay"


@pytest.mark.parametrize("kind", ["podAntiAffinity", "podAffinity", "nodeAffinity"])
def test_null_in_an_affinity_says_the_same_as_no_value(kind: str) -> None:
    cluster = dataclasses.replace(PLAIN, topology="rack")
    for empty in (None, {}, {REQUIRED: None}, {PREFERRED: None, REQUIRED: None}):
        given = dataclasses.replace(cluster, affinity={kind: empty})
        assert pod_of(rendered(given, avoid=("n3",)))["affinity"] == pod_of(rendered(cluster, avoid=("n3",)))["affinity"]


@pytest.mark.parametrize("workload", KINDS)
def test_the_cluster_itself_ends_and_removes_a_trial_that_nobody_comes_back_for(workload: str) -> None:
    cluster = dataclasses.replace(PLAIN, workload=workload, deadline_seconds=61, ttl_seconds=3601)
    assert set(found("activeDeadlineSeconds", rendered(cluster))) == {61}
    assert found("ttlSecondsAfterFinished", rendered(cluster)) == ([] if workload in ("pods", "trainjob") else [3601])
    never = rendered(dataclasses.replace(cluster, deadline_seconds=None, ttl_seconds=None))
    assert found("activeDeadlineSeconds", never) == found("ttlSecondsAfterFinished", never) == []


def test_no_trial_is_removed_before_its_launcher_has_had_time_to_come_back() -> None:
    with pytest.raises(ConfigError, match=r"^cluster\.ttl_seconds=60 .* use 3600 or more"):
        from_dict(KubernetesCluster, {"ttl_seconds": 60}, "cluster.")
    ttl = KubernetesCluster().ttl_seconds
    assert ttl is not None and ttl > 3 * 24 * 3600, "a long weekend"


def found(name: str, item: Any) -> list[Any]:
    """Every value of that field, however deep."""
    if isinstance(item, list):
        return [value for one in item for value in found(name, one)]
    if not isinstance(item, dict):
        return []
    return [value for key, inner in item.items() for value in ([inner] if key == name else found(name, inner))]


@pytest.mark.parametrize(("required", "word"), [(False, "preferred"), (True, "required")])
def test_a_topology_is_for_kueue_to_see_to_if_there_is_a_queue_and_else_an_affinity(required: bool, word: str) -> None:
    cluster = dataclasses.replace(PLAIN, topology="rack", topology_required=required)
    assert f"{word}DuringSchedulingIgnoredDuringExecution" in pod_of(rendered(cluster))["affinity"]["podAffinity"]
    zone = {"topologyKey": "zone"}
    own = {"podAffinity": {REQUIRED: [zone], PREFERRED: [{"weight": 1, "podAffinityTerm": zone}]}}
    both = pod_of(rendered(dataclasses.replace(cluster, affinity=own)))["affinity"]["podAffinity"]
    assert [len(both[kind]) for kind in (REQUIRED, PREFERRED)] == ([2, 1] if required else [1, 2]), "a site's own wishes stay"
    queued = rendered(dataclasses.replace(cluster, queue="q"))[2]["spec"]["template"]
    assert queued["metadata"]["annotations"] == {f"kueue.x-k8s.io/podset-{word}-topology": "rack"}
    assert "podAffinity" not in queued["spec"]["affinity"]


@pytest.mark.parametrize("workload", ["job", "jobset", "trainjob"])
def test_a_queued_workload_starts_suspended(workload: str) -> None:
    manifest = rendered(dataclasses.replace(variant(workload, False), queue="q"))[2]
    assert manifest["spec"]["suspend"] is True and manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"


def test_queued_pods_are_one_group_that_is_admitted_whole() -> None:
    for pod in rendered(dataclasses.replace(variant("pods", False), queue="q"))[2:]:
        assert pod["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] == NAME
        assert pod["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "2"


@pytest.mark.parametrize("text", ["x y $(B)", "$$", "a$b", "$$(B)", "$(B", "${B}", "plain"])
def test_what_a_container_is_told_is_what_was_said(text: str) -> None:
    """Kubernetes expands commands and variables; the launcher in the cluster must compose what the command line said."""
    cluster = dataclasses.replace(PLAIN, env={"A": text}, python=text)
    inside = launcher_job("run", ["run", f"cluster.env={{A: '{text}'}}"], cluster, "launcher:1")["spec"]["template"]["spec"]
    for container in (inside["containers"][0], pod_of(rendered(cluster))["containers"][0]):
        values = {item["name"]: expanded(item["value"]) for item in container["env"]}
        assert values["A"] == text and expanded(container["command"][0]) == text
    assert expanded(inside["containers"][0]["command"][-1]) == f"cluster.env={{A: '{text}'}}"


def expanded(text: str) -> str:
    """What a container gets of ``text``, where a variable B is set."""
    return re.sub(r"\$(\$|\(B\))", lambda match: "$" if match[1] == "$" else "another value", text)


@pytest.mark.parametrize(
    ("text", "server", "path"),
    [
        ("filer:/data", "filer", "/data"),
        ("[fe80::1]:/p", "fe80::1", "/p"),
        ("fe80::1:/p", "fe80::1", "/p"),
        ("10.0.0.1:/a:/b", "10.0.0.1", "/a:/b"),
    ],
)
def test_the_server_of_an_nfs_volume_may_be_an_address(text: str, server: str, path: str) -> None:
    cluster = dataclasses.replace(PLAIN, volumes=[VolumeConfig(mount="/x", nfs=text)])
    assert {"name": "volume-0", "nfs": {"server": server, "path": path}} in pod_of(rendered(cluster))["volumes"]


def test_no_path_is_mounted_twice_in_a_pod_of_the_launcher() -> None:
    cluster = dataclasses.replace(PLAIN, restricted=False, volumes=[VolumeConfig(mount="/tmp", claim="scratch")])
    (container,) = launcher_job("run", [], check_cluster(cluster), "launcher:1")["spec"]["template"]["spec"]["containers"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/tmp"]


# -- text that YAML might take for something else ------------------------------------------------------------------------------


AMBIGUOUS = [
    *("y", "Y", "n", "N", "yes", "No", "ON", "off", "true", "False", "null", "NULL", "~", ""),
    *("1", "-1", "+1", "007", "089", "1_000", "-_1", "1e3", "1E3", "1.e+3", "-.5e-1", ".5", "12345678e901", "1e400", "0x1F", "0o17", "0b11", "-0b1"),
    *("1:30", "190:20:30.15", "2026-11-20", "2026-11-20T10:00:05Z", "2026-1-2 3:4:5", ".inf", "-.INF", "+.Inf", ".nan", ".NaN", "inf", "-Infinity", "nan"),
    *("=", "<<", "-", "?", "- a", "a: b", "a #b", "#a", "{a}", "[a]", "*a", "&a", "!a", "%a", "@a", "`a", "|", ">", "'", '"', " a", "a ", ":"),
]  # fmt: skip
PLAIN_WORDS = [
    *("trireme", "node", "-u", "/trireme/entry.py", "registry.example/trireme:1", "None", "yesterday", "info", "nano", "e3", "a1e3"),
    *("8Gi", "100m", "10.0.0.1/x", "x" * 200),
]


TIME = re.compile(r"[-+]?\d+(:\d+)+(\.\d*)?|\d{4}-\d\d?-\d\d?([t\s][-+.:z\s\d]*)?")


def other_than_text(text: str) -> bool:
    """Whether some reader of YAML takes ``text``, without quotes, for a number, a truth value or nothing."""
    digits = text.replace("_", "").lower()
    for number in (float, lambda word: int(word, 0), lambda word: float(word.replace(".inf", "inf").replace(".nan", "nan"))):
        try:
            number(digits)
        except ValueError:
            continue
        return True
    return text.lower() in ("", "~", "null", "true", "false", "yes", "no", "on", "off", "y", "n") or bool(TIME.fullmatch(digits))


ids = st.from_regex(r"[0-9a-f]{8,12}|[0-9]{4,8}e[0-9]{1,7}", fullmatch=True)
odd = st.text("0123456789abefoxinyENY_+-.:~", max_size=12)


@given(st.one_of(st.sampled_from(AMBIGUOUS), ids, odd))
def test_text_that_a_reader_of_yaml_could_take_for_something_else_is_quoted(text: str) -> None:
    assert from_text(to_text([{text: [text]}])) == [{text: [text]}]
    written = to_text([{"key": text}]).removeprefix("---\nkey: ").removesuffix("\n")
    doubled = text.replace("'", "''")
    assert written[0] in "'\"" if other_than_text(text) else written in (text, f"'{doubled}'")


@pytest.mark.parametrize("text", PLAIN_WORDS)
def test_words_are_written_as_they_are(text: str) -> None:
    assert to_text([{"key": text}]) == f"---\nkey: {text}\n"


def test_what_is_printed_is_to_the_parser_of_kubernetes_what_is_sent(kubernetes: Kubernetes) -> None:
    """The server reads YAML as kubectl does. Names of keys are read as values are."""
    texts = dict.fromkeys(
        [*AMBIGUOUS, *PLAIN_WORDS, *(f"{number:x}e{number % 1000}" for number in range(10**7, 10**7 + 300)), "a\nb\n", "\n a \n\n"]
    )
    head = {"name": "odd", "namespace": "default", "labels": {"y": "y", "1e3": "12345678e901"}}
    sent = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": head, "data": {f"key-{number}": text for number, text in enumerate(texts)}}
    api = kubernetes.core().api_client
    _, url, headers, _, _ = api.param_serialize(
        "POST", "/api/v1/namespaces/default/configmaps", [], [("dryRun", "All")], auth_settings=["BearerToken"]
    )
    answer = api.call_api("POST", url, {**headers, "Content-Type": "application/yaml"}, to_text([sent]))
    answer.read()
    assert answer.status == 201, answer.data
    stored = json.loads(answer.data)
    assert stored["data"] == sent["data"] and stored["metadata"]["labels"] == head["labels"]


# -- patches ----------------------------------------------------------------------------------------------------------------


def test_a_patch_is_merged_last_named_items_by_name_and_null_deletes() -> None:
    patch = {
        "Pod": {
            "spec": {
                "hostNetwork": True,
                "subdomain": None,
                "containers": [{"name": "node", "env": [{"name": "WORLD_SIZE", "value": "3"}]}],
            }
        }
    }
    pod = pod_of(rendered(dataclasses.replace(PLAIN, patch=patch)))
    environment = {item["name"]: item.get("value") for item in pod["containers"][0]["env"]}
    assert pod["hostNetwork"] is True and "subdomain" not in pod
    assert environment["WORLD_SIZE"] == "3" and environment["TRIREME_OUT"] == "/trials/0123456789ab" and len(pod["containers"]) == 1


def test_pods_on_the_hosts_network_still_ask_the_clusters_dns_for_pod_0() -> None:
    host = {"Pod": {"spec": {"hostNetwork": True}}}
    assert pod_of(rendered(dataclasses.replace(PLAIN, patch=host)))["dnsPolicy"] == "ClusterFirstWithHostNet"
    host["Pod"]["spec"] |= {"dnsPolicy": "Default"}
    assert pod_of(rendered(dataclasses.replace(PLAIN, patch=host)))["dnsPolicy"] == "Default"
    assert "dnsPolicy" not in pod_of(rendered())


def test_a_patch_can_reach_every_object() -> None:
    patch = {"Job": {"spec": {"ttlSecondsAfterFinished": 60}}, "Service": {"metadata": {"labels": {"x": "y"}}}}
    objects = rendered(dataclasses.replace(PLAIN, patch=patch))
    assert objects[2]["spec"]["ttlSecondsAfterFinished"] == 60 and objects[0]["metadata"]["labels"]["x"] == "y"


@pytest.mark.parametrize("workload", KINDS)
def test_a_patch_may_add_to_the_lists_that_the_launcher_needs_and_change_what_their_items_say(workload: str) -> None:
    command = ["sh", "-c", 'ulimit -c 0; exec "$@"', "--", "python", "-u", "/trireme/entry.py"]
    node = {
        "name": "node",
        "command": command,
        "env": [{"name": "LEVEL", "value": "1"}],
        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    }
    scratch = [{"name": "scratch", "emptyDir": {}}, {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}]
    objects = rendered(dataclasses.replace(variant(workload, False), patch={"Pod": {"spec": {"containers": [node], "volumes": scratch}}}))
    before = rendered(variant(workload, False))
    names = [
        [{item["name"] for item in max(found(part, made), key=len)} for made in (before, objects)]
        for part in ("env", "volumes", "volumeMounts")
    ]
    assert [after - own for own, after in names] == [{"LEVEL"}, {"scratch"}, {"scratch"}] and all(own < after for own, after in names)
    assert found("command", objects)[0] == command and {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}} in found("volumes", objects)[0]


SET = "[{name: node, template: null}]"


def of_node(change: str) -> str:
    """A patch of the container that the ranks run in."""
    return f"{{Pod: {{spec: {{containers: [{{name: node, {change}}}]}}}}}}"


NEEDED = {
    "Pod.metadata=null": ("job", "{Pod: {metadata: null}}"),
    'Pod.metadata.name="x"': ("job", "{Pod: {metadata: {name: x}}}"),
    "Pod.metadata.labels=null": ("jobset", "{Pod: {metadata: {labels: null}}}"),
    "Pod.spec=null": ("job", "{Pod: {spec: null}}"),
    'Pod.spec="x"': ("job", "{Pod: {spec: x}}"),
    "Pod.spec.containers=[]": ("job", "{Pod: {spec: {containers: []}}}"),
    "Pod.spec.containers=null": ("trainjob", "{Pod: {spec: {containers: null}}}"),
    "Job.metadata=null": ("job", "{Job: {metadata: null}}"),
    'Job.metadata.name="x"': ("job", "{Job: {metadata: {name: x}}}"),
    'Job.metadata.namespace="x"': ("job", "{Job: {metadata: {namespace: x}}}"),
    'Job.kind="Foo"': ("job", "{Job: {kind: Foo}}"),
    'Job.apiVersion="v2"': ("job", "{Job: {apiVersion: v2}}"),
    "Job.spec=null": ("job", "{Job: {spec: null}}"),
    "Job.spec.template=null": ("job", "{Job: {spec: {template: null}}}"),
    "Job.spec.tasks=null": ("volcano", "{Job: {spec: {tasks: null}}}"),
    "JobSet.spec.replicatedJobs=[]": ("jobset", "{JobSet: {spec: {replicatedJobs: []}}}"),
    "JobSet.spec.replicatedJobs.node.template=null": ("jobset", f"{{JobSet: {{spec: {{replicatedJobs: {SET}}}}}}}"),
    "TrainJob.spec.trainer=null": ("trainjob", "{TrainJob: {spec: {trainer: null}}}"),
    "Service.spec=null": ("pods", "{Service: {spec: null}}"),
    'Service.metadata.labels.trireme/job="q"': ("job", "{Service: {metadata: {labels: {trireme/job: q}}}}"),
    "Service.metadata.annotations=null": ("job", "{Service: {metadata: {annotations: null}}}"),
    'ConfigMap.data.config.yaml="x"': ("job", "{ConfigMap: {data: {config.yaml: x}}}"),
    "ConfigMap.data=null": ("job", "{ConfigMap: {data: null}}"),
    "Pod.spec.containers.node.env=null": ("pods", of_node("env: null")),
    'Pod.spec.containers.node.env=[{"value": "1"}]': ("trainjob", of_node('env: [{value: "1"}]')),
    'Pod.spec.containers.node.env.MASTER_ADDR={"name": "MASTER_ADDR", "value": null}': (
        "job",
        of_node("env: [{name: MASTER_ADDR, value: null}]"),
    ),
    "Pod.spec.containers.node.command=null": ("volcano", of_node("command: null")),
    'Pod.spec.containers.node.command="python"': ("job", of_node("command: python")),
    'Pod.spec.containers.node.command=["sleep", "1"]': ("job", of_node('command: [sleep, "1"]')),
    "Pod.spec.containers.node.volumeMounts=null": ("jobset", of_node("volumeMounts: null")),
    'Pod.spec.containers.node.volumeMounts.trials={"name": "trials", "mountPath": "/other"}': (
        "job",
        of_node("volumeMounts: [{name: trials, mountPath: /other}]"),
    ),
    "Pod.spec.volumes=null": ("pods", "{Pod: {spec: {volumes: null}}}"),
    "Pod.spec.volumes.trireme.configMap=null": ("job", "{Pod: {spec: {volumes: [{name: trireme, configMap: null, emptyDir: {}}]}}}"),
    'Pod.spec.volumes.trials={"name": "trials", "emptyDir": null}': ("job", "{Pod: {spec: {volumes: [{name: trials, emptyDir: null}]}}}"),
    "Service.spec.selector=null": ("pods", "{Service: {spec: {selector: null}}}"),
    'Service.spec.selector.trireme/job="q"': ("job", "{Service: {spec: {selector: {trireme/job: q}}}}"),
    'Job.spec.completionMode="NonIndexed"': ("job", "{Job: {spec: {completionMode: NonIndexed}}}"),
    "Job.spec.completions=3": ("job", "{Job: {spec: {completions: 3}}}"),
    "Job.spec.parallelism=1": ("job", "{Job: {spec: {parallelism: 1}}}"),
    "Job.spec.template.spec.containers.node.env=null": (
        "job",
        "{Job: {spec: {template: {spec: {containers: [{name: node, env: null}]}}}}}",
    ),
    "Job.spec.tasks.node.template.spec.volumes=null": (
        "volcano",
        "{Job: {spec: {tasks: [{name: node, template: {spec: {volumes: null}}}]}}}",
    ),
    "JobSet.spec.replicatedJobs.node.template.spec.parallelism=1": (
        "jobset",
        "{JobSet: {spec: {replicatedJobs: [{name: node, template: {spec: {parallelism: 1}}}]}}}",
    ),
    "JobSet.spec.replicatedJobs.node.replicas=2": ("jobset", "{JobSet: {spec: {replicatedJobs: [{name: node, replicas: 2}]}}}"),
    "Job.spec.tasks.node.replicas=1": ("volcano", "{Job: {spec: {tasks: [{name: node, replicas: 1}]}}}"),
    "TrainJob.spec.trainer.numNodes=1": ("trainjob", "{TrainJob: {spec: {trainer: {numNodes: 1}}}}"),
    "TrainJob.spec.trainer.env=[]": ("trainjob", "{TrainJob: {spec: {trainer: {env: []}}}}"),
    "TrainJob.spec.trainer.command=null": ("trainjob", "{TrainJob: {spec: {trainer: {command: null}}}}"),
    "TrainJob.spec.runtimePatches=null": ("trainjob", "{TrainJob: {spec: {runtimePatches: null}}}"),
}


@pytest.mark.parametrize(("words", "workload", "patch"), [(words, *case) for words, case in NEEDED.items()])
def test_no_patch_takes_away_what_the_launcher_itself_needs(words: str, workload: str, patch: str) -> None:
    with pytest.raises(ConfigError) as refused:
        rendered(dataclasses.replace(variant(workload, False), patch=yaml.safe_load(patch)))
    said = str(refused.value)
    assert said.startswith(f"cluster.patch.{words} ") and "which the launcher itself needs; leave it out of the patch" in said
    assert "\n" not in said and len(said) < 400


@pytest.mark.parametrize(
    ("base", "patch", "merged"),
    [
        ({"a": 1}, {"b": {"c": None, "d": 2}}, {"a": 1, "b": {"d": 2}}),
        ([{"name": "a", "x": 1}], [{"name": "b"}, {"name": "a", "y": 2}], [{"name": "a", "x": 1, "y": 2}, {"name": "b"}]),
        ([1, 2], [3], [3]),
        ({"a": [{"name": "x"}]}, {"a": []}, {"a": []}),
    ],
)
def test_merging(base: Any, patch: Any, merged: Any) -> None:
    assert merge(base, patch) == merged


# -- what is refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"container": {}}, "cluster.container.image is null"),
        ({"patch": {"Pod": {"spec": {"hostNetwrk": True}}}}, "spec.hostNetwrk is not a field of Kubernetes; correct it in cluster.patch"),
        ({"patch": {"Deployment": {}}}, "cluster.patch.Deployment names no kind of this workload; it has Pod, Service, ConfigMap or Job"),
        ({"tolerations": [{"key": 3}]}, "tolerations.0.key is wrong: input should be a valid string"),
        ({"affinity": {"nodeAffinitee": {}}}, "cluster.affinity.nodeAffinitee={} is not a field of Kubernetes; give what 'kubectl"),
        ({"affinity": {"podAntiAffinity": []}}, "cluster.affinity.podAntiAffinity=[] is wrong: input should be a valid mapping; give what"),
        ({"affinity": {"podAntiAffinity": "abc"}}, 'cluster.affinity.podAntiAffinity="abc" is wrong: input should be a valid mapping;'),
        ({"affinity": {"podAntiAffinity": {REQUIRED: "abc"}}}, f'podAntiAffinity.{REQUIRED}="abc" is wrong: input should be a valid list'),
        (
            {"affinity": {"podAntiAffinity": {REQUIRED: [{}]}}},
            f"cluster.affinity.podAntiAffinity.{REQUIRED}.0.topologyKey is missing; give",
        ),
        ({"affinity": {"nodeAffinity": {PREFERRED: 3}}, "spread": False}, f"cluster.affinity.nodeAffinity.{PREFERRED}=3 is wrong"),
        ({"volumes": [{"mount": "/x"}]}, "has 0 sources; give exactly one of claim, host_path, nfs, config_map or secret"),
        ({"volumes": [{"mount": "/x", "claim": "a", "nfs": "s:/p"}]}, "has 2 sources"),
        ({"volumes": [{"mount": "x", "claim": "a"}]}, "'x' is not an absolute path"),
        ({"volumes": [{"mount": "/x", "nfs": "server"}]}, "nfs='server' is not SERVER:/PATH"),
        ({"container": {"image": "i", "mounts": ["data:/data"]}}, "'data:/data', which is not SRC:DST or SRC:DST:ro"),
        ({"run_dir": "/runs"}, "cluster.run_dir=/runs is not inside a mounted volume"),
        ({"user": 0}, "cluster.user=0 is root, which cluster.restricted=true forbids"),
        ({"workload": "volcano", "topology": "rack"}, "cluster.topology is not passed on to Volcano"),
        ({"queue_priority": "high"}, "it needs cluster.queue"),
        (
            {"workload": "trainjob", "priority_class": "high"},
            "has no place for the pod's spec.priorityClassName; set it in the ClusterTrainingRuntime",
        ),
        ({"workload": "trainjob", "pull_policy": "Always"}, "containers.imagePullPolicy"),
        ({"workload": "cronjob"}, "cluster.workload='cronjob' is not one of"),
        ({"secrets": {"TOKEN": "the token itself"}}, "cluster.secrets.TOKEN is not SECRET/KEY"),
        ({"env": {"WANDB_API_KEY": "123"}}, "cluster.env.WANDB_API_KEY looks like a secret"),
        ({"env": {"WORLD_SIZE": "3"}}, "cluster.env.WORLD_SIZE is set by the launcher in pods; rename it"),
        ({"secrets": {"MASTER_ADDR": "a/b"}}, "cluster.secrets.MASTER_ADDR is set by the launcher in pods; rename it"),
        ({"env": {"OPENAI_KEY": "123456"}}, "refer to it with cluster.secrets.OPENAI_KEY=SECRET/KEY"),
        ({"env": {"PROXY": "http://me:word@proxy:3128"}}, "cluster.env.PROXY looks like an address with a password"),
        ({"annotations": {"example.org/upload-token": "abcdefgh"}}, "cluster.annotations.example.org/upload-token looks like a secret"),
        (
            {"patch": {"Pod": {"spec": {"containers": [{"name": "node", "env": [{"name": "PGPASS", "value": "hunter22"}]}]}}}},
            "cluster.patch.Pod.spec.containers.0.env.0.PGPASS looks like a secret",
        ),
    ],
)
def test_wrong_settings_are_refused_in_one_plain_sentence_before_anything_is_sent(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        cluster = from_dict(KubernetesCluster, {"backend": "kubernetes", "container": {"image": "i"}, **change}, "cluster.")
        render(job(cluster, 8), check_cluster(cluster), CONFIG)
    assert words in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_a_password_in_an_address_of_the_run_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as refused:
        render(job(), PLAIN, "tracking:\n  uri: https://me:hunter2@mlflow.example/\n")
    assert "cluster.secrets.MLFLOW_TRACKING_PASSWORD" in str(refused.value) and "hunter2" not in str(refused.value)


def test_no_key_of_a_run_is_taken_for_a_secret() -> None:
    run = yaml.safe_dump(to_dict(Config().train_config()))
    assert "text_key" in run
    render(job(), PLAIN, run)


def test_the_programs_of_the_pods_need_nothing_but_the_standard_library() -> None:
    import ast
    import sys

    trees = [ast.parse(program.read_text()) for program in PROGRAMS]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    imported = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {(node.module or "").split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
    assert imported <= {*sys.stdlib_module_names, *(program.stem for program in PROGRAMS)}


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        golden_path(*case).write_text(golden_text(*case))
