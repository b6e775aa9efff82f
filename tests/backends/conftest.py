"""Fixtures of the backends' tests: a real Slurm."""

from tests.clusters.slurm.fixture import slurm, whole

__all__ = ["slurm", "whole"]
