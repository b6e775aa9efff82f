"""Fixtures of the backends' tests: a real Slurm, a real Kubernetes."""

from tests.clusters.kubernetes.fixture import kubernetes, namespace, played_nodes, real_node
from tests.clusters.slurm.fixture import slurm, whole

__all__ = ["kubernetes", "namespace", "played_nodes", "real_node", "slurm", "whole"]
