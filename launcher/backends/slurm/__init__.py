"""Trials as Slurm jobs: submitted as job arrays, watched with squeue and sacct, in containers or not.

``plan`` derives once what ``options``, ``container``, ``mounts``, ``variables`` and ``script`` render; ``states`` and ``errors`` translate
Slurm's answers; ``client`` runs its commands; ``submission`` and ``watcher`` use them; ``backend`` implements the contract.
"""

CLUSTER = "launcher.backends.slurm.cluster:SlurmCluster"
BACKEND = "launcher.backends.slurm.backend:SlurmBackend"
