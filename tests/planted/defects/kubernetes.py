"""Kubernetes: states, causes, manifests."""

from __future__ import annotations

from tests.planted.defect import Defect

STATES, CAUSES, MANIFESTS = (f"launcher/backends/kubernetes/{name}.py" for name in ("states", "causes", "manifests"))
JUDGED, RENDERED = (
    "tests/backends/test_kubernetes_states.py tests/backends/test_kubernetes_made_again.py",
    "tests/backends/test_kubernetes_manifests.py",
)

DEFECTS = [
    Defect(
        "a pod that was made again is counted twice",
        STATES,
        "return [pod for _, pod in sorted({index_of(pod): pod for pod in ordered}.items())]",
        "return sorted(ordered, key=index_of)",
        JUDGED,
    ),
    Defect(
        "a job runs as soon as one of its pods does",
        STATES,
        "    if at_work == job.count:\n",
        "    if at_work:\n",
        JUDGED,
    ),
    Defect(
        "the last pod to fail is blamed",
        STATES,
        "return cause.weight, cause.stopped, (cause.deleted if cause.weight == DELETED else cause.ended) or 0.0",
        "return cause.weight, cause.stopped, -((cause.deleted if cause.weight == DELETED else cause.ended) or 0.0)",
        JUDGED,
    ),
    Defect(
        "a pod that was evicted for memory has lost its node",
        CAUSES,
        'return (Reason.HOST_MEMORY if "memory" in message else Reason.NODE), f"Evicted: {message}"',
        'return Reason.NODE, f"Evicted: {message}"',
        JUDGED,
    ),
    Defect(
        "a container of a service mesh is taken for the ranks",
        CAUSES,
        'own = next((status for status in statuses if status.get("name") == CONTAINER), statuses[0] if len(statuses) == 1 else {})',
        "own = statuses[0] if statuses else {}",
        JUDGED,
    ),
    Defect(
        "two launchers take each other's jobs for theirs",
        MANIFESTS,
        "return hashlib.sha256(str(job.directory.parent).encode()).hexdigest()[:8]",
        "return hashlib.sha256(job.directory.parent.name.encode()).hexdigest()[:8]",
        RENDERED,
    ),
    Defect(
        "a pod asks for the GPUs of a whole node",
        MANIFESTS,
        "str(min(job.world_size, job.cluster.gpus_per_node))",
        "str(job.cluster.gpus_per_node)",
        RENDERED,
    ),
    Defect(
        "a secret is a value of a manifest",
        MANIFESTS,
        '[{"name": name, "valueFrom": {"secretKeyRef": {"name": holder, "key": item}}} for name, holder, item in secret]',
        '[{"name": name, "value": f"{holder}/{item}"} for name, holder, item in secret]',
        RENDERED,
    ),
    Defect(
        "a value with a dollar is replaced in its pod",
        MANIFESTS,
        'return text.replace("$", "$$")',
        "return text",
        RENDERED,
    ),
    Defect(
        "a node that has not heard of a secret is taken for one that has none",
        "launcher/backends/kubernetes/causes.py",
        'if NODE_WAITS in (waiting.get("message") or ""):',
        "if False:",
        "tests/backends/test_kubernetes_states.py",
    ),
]
