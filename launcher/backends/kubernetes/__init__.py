"""Kubernetes: a trial is a gang of pods.

manifests, workloads   from a job to Kubernetes objects; pure
causes, states         from Kubernetes objects to how the job stands; pure
errors                 from an API server's refusals to plain sentences; pure
client, watch          the API server
entry, logs            the program inside the pods, and the reading of what it sends back
backend                the contract, made of these
"""

from launcher.backends.kubernetes.backend import KubernetesBackend

__all__ = ["KubernetesBackend"]
