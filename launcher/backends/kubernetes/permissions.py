"""What the launcher needs to be allowed, and how it finds out beforehand."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.backends.kubernetes.client import Client
from launcher.backends.kubernetes.errors import RBAC
from launcher.backends.kubernetes.workloads import WorkloadKind


def needed(kind: WorkloadKind) -> Iterator[tuple[str, str, str]]:
    """``(verb, group, resource)`` of everything that is done in the namespace: deploy/kubernetes/rbac.yaml grants no more."""
    wanted = {
        ("", "services"): "get list watch create delete",
        ("", "configmaps"): "get create",
        ("", "pods"): "get list watch delete",
        ("", "pods/log"): "get",
        ("", "events"): "list watch",
    }
    if kind.kind == "Pod":
        wanted["", "pods"] += " create"
    else:  # patch: the Service goes with what makes the pods
        wanted["", "services"] += " patch"
        wanted[kind.group, kind.plural] = "get list watch create"
    for (group, resource), verbs in wanted.items():
        for verb in verbs.split():
            yield verb, group, resource


def missing_permissions(client: Client, kind: WorkloadKind) -> str:
    """One sentence that names everything that is not allowed; empty if all is."""
    refused: dict[str, list[str]] = {}
    for verb, group, resource in needed(kind):
        if not client.may(verb, group, resource):
            refused.setdefault(f"{resource}.{group}" if group else resource, []).append(verb)
    if not refused:
        return ""
    listed = "; ".join(f"{', '.join(verbs)} {resource}" for resource, verbs in refused.items())
    return f"in namespace {client.namespace} you may not: {listed}; have it granted: {RBAC}"
