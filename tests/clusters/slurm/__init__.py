"""A real Slurm of several nodes on one machine, for tests: ``python -m tests.clusters.slurm --help``."""

from tests.clusters.slurm.cluster import Cluster
from tests.clusters.slurm.configuration import Settings
from tests.clusters.slurm.packages import install, why_not

__all__ = ["Cluster", "Settings", "install", "why_not"]
