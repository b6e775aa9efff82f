"""A real Kubernetes on one machine, for tests: ``python -m tests.clusters.kubernetes --help``."""

from tests.clusters.kubernetes.cluster import Cluster, Host, OwnCluster, obstacle

__all__ = ["Cluster", "Host", "OwnCluster", "obstacle"]
