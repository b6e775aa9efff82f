"""Trials as Slurm jobs: submitted as job arrays, watched with squeue and sacct, in containers or not.

cluster.py     the settings, and what they answer of the place
mounts.py      what a container is given of the host's files
variables.py   the environment variables of the ranks
plan.py        what script, options and container are made of, derived once
options.py     what a job asks of Slurm: sbatch options, and how text is quoted for them
owned.py       options that are Trireme's own, with the key to use instead
container.py   what the ranks run in: pyxis, Apptainer, an OCI bundle, or nothing
script.py      the job script of a trial and of an array of trials (job.sh.jinja, array.sh.jinja)
states.py      from Slurm's words to our statuses and reasons
errors.py      from the words of Slurm, a job's script and the ranks' Python to one plain line
client.py      running Slurm's commands
submission.py  arrays: intent, sbatch, and finding again what was submitted
watcher.py     one question for the states of all jobs
backend.py     the backend made of these
"""

CLUSTER = "launcher.backends.slurm.cluster:SlurmCluster"
BACKEND = "launcher.backends.slurm.backend:SlurmBackend"
