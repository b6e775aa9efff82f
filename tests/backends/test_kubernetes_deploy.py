"""What is shipped in deploy/ for Kubernetes: valid under the strict schemas of a current Kubernetes, and accepted by a real server."""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.clusters.kubernetes.fixture import PROJECT, Kubernetes

FOLDER = PROJECT / "deploy" / "kubernetes"
CURRENT = "1.36"
DOCUMENTS = [(path.name, document) for path in sorted(FOLDER.glob("*.yaml")) for document in yaml.safe_load_all(path.read_text())]
CORE = [(file, document) for file, document in DOCUMENTS if "kueue" not in document["apiVersion"]]
QUEUES = {document["kind"]: document for _, document in DOCUMENTS if "kueue" in document["apiVersion"]}


def names(documents: list[tuple[str, Any]]) -> list[str]:
    return [f"{file}:{document['kind']}/{document['metadata']['name']}" for file, document in documents]


def pods() -> list[dict[str, Any]]:
    """Specifications of all pods that the documents make."""
    return [document["spec"]["template"]["spec"] for _, document in CORE if "template" in document.get("spec", {})]


@pytest.mark.parametrize("document", [document for _, document in CORE], ids=names(CORE))
def test_every_document_satisfies_the_strict_schema_of_a_current_kubernetes(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, CURRENT, strict=True)


def test_a_wrong_field_would_be_noticed() -> None:
    wrong = {**next(document for _, document in CORE if document["kind"] == "Job")}
    wrong["spec"] = {**wrong["spec"], "backofLimit": 3}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, CURRENT, strict=True)


def test_every_document_is_accepted_by_a_real_server(kubernetes: Kubernetes) -> None:
    """In a dry run, in the namespace that the first of them makes; this server is older than what they may use, and must know all of it."""
    from launcher.backends.kubernetes.errors import dropped

    api = kubernetes.core().api_client
    for _, document in CORE:
        group = "apis" if "/" in document["apiVersion"] else "api"
        place = f"/namespaces/{_namespace(document)}" if "namespace" in document["metadata"] else ""
        plural = re.sub(r"s$", "se", document["kind"].lower()) + "s"
        path = f"/{group}/{document['apiVersion']}{place}/{plural}"
        sent = {**document, "metadata": {**document["metadata"], **({"namespace": _namespace(document)} if place else {"name": "other"})}}
        _, url, headers, body, _ = api.param_serialize("POST", path, [], [("dryRun", "All")], body=sent, auth_settings=["BearerToken"])
        answer = api.call_api("POST", url, {**headers, "Content-Type": "application/json"}, body)
        answer.read()
        assert answer.status == 201, (document["kind"], answer.data)
        assert dropped(sent, yaml.safe_load(answer.data)) == []


def _namespace(document: dict[str, Any]) -> str:
    assert document["metadata"]["namespace"] == "trireme"
    return "default"  # there from the start


def test_what_documents_name_is_made_by_documents() -> None:
    """Service accounts, claims, queues and images: a name that is wrong in one place would be found out only on the cluster."""
    there = {(document["kind"], document["metadata"]["name"]) for _, document in DOCUMENTS}
    for pod in pods():
        account = pod.get("serviceAccountName")
        assert account is None or ("ServiceAccount", account) in there
        for volume in pod["volumes"]:
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            assert claim is None or ("PersistentVolumeClaim", claim) in there
    local, cluster = QUEUES["LocalQueue"], QUEUES["ClusterQueue"]
    assert local["spec"]["clusterQueue"] == cluster["metadata"]["name"]
    (group,) = cluster["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    assert flavor["name"] == QUEUES["ResourceFlavor"]["metadata"]["name"]
    assert [resource["name"] for resource in flavor["resources"]] == group["coveredResources"]
    assert QUEUES["ResourceFlavor"]["spec"]["topologyName"] == QUEUES["Topology"]["metadata"]["name"]


def test_pods_meet_the_restricted_standard_that_the_namespace_enforces() -> None:
    (namespace,) = [document for _, document in CORE if document["kind"] == "Namespace"]
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for pod in pods():
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True and context["runAsUser"] > 0 and context["seccompProfile"]["type"] == "RuntimeDefault"
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_images_are_stages_of_the_dockerfile_or_of_a_named_version() -> None:
    stages = re.findall(r"(?m)^FROM \S+ AS (\S+)$", (PROJECT / "deploy" / "Dockerfile").read_text())
    for pod in pods():
        for container in pod["containers"]:
            name, _, tag = container["image"].partition(":")
            assert name.removeprefix("trireme-") in stages if name.startswith("trireme-") else tag not in ("", "latest")
