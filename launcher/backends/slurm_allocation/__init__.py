"""Trials as steps of one Slurm job, the allocation: that in which the launcher runs, or one that it asks for.

``steward.sh.jinja`` is the script of the allocation: it starts the scripts of trials as nodes become free; ``allocation`` is its folder,
through which launchers hand them over; ``steps`` derives what differs from a job of its own; ``backend`` implements the contract.
"""

CLUSTER = "launcher.backends.slurm_allocation.cluster:SlurmAllocationCluster"
BACKEND = "launcher.backends.slurm_allocation.backend:SlurmAllocationBackend"
