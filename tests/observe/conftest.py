"""Real clusters, for the tests of this folder that start another trainer on one."""

from tests.clusters.kubernetes.fixture import kubernetes, real_node
from tests.clusters.slurm.fixture import slurm

__all__ = ["kubernetes", "real_node", "slurm"]
