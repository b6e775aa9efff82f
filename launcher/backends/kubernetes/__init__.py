"""Kubernetes: a trial is a gang of pods.

``cluster``, ``values``, ``volumes``, ``manifests``, ``workloads``, ``causes``, ``states`` and ``errors`` are pure; ``client`` and ``watch``
talk to the API server; ``entry`` runs inside the pods and ``logs`` reads its output; ``backend`` implements the contract.
"""

CLUSTER = "launcher.backends.kubernetes.cluster:KubernetesCluster"
BACKEND = "launcher.backends.kubernetes.backend:KubernetesBackend"
