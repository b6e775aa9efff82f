"""Kubernetes: a trial is a gang of pods.

cluster, values, volumes  the settings, and what an API server takes; pure
manifests, workloads   from a job to Kubernetes objects; pure
causes, states         from Kubernetes objects to how the job stands; pure
errors                 from an API server's refusals to plain sentences; pure
client, watch          the API server
entry, logs            the program inside the pods, and the reading of what it sends back
backend                the contract, made of these
"""

CLUSTER = "launcher.backends.kubernetes.cluster:KubernetesCluster"
BACKEND = "launcher.backends.kubernetes.backend:KubernetesBackend"
