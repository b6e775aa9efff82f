#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks=8
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --comment="trireme sweep demo"
#SBATCH --signal=B:USR1@120
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --job-name=trireme-demo-89abcdef
#SBATCH --array=0-2%2
#SBATCH --output=/dev/null
#SBATCH --dependency=afterany:41

# Jobs of equal size, each the script of one trial's attempt.
jobs=(
  /shared/runs/trials/000000000001/logs/attempt0.submitted.txt
  /shared/runs/trials/000000000002/logs/attempt0.submitted.txt
  /shared/runs/trials/000000000003/logs/attempt0.submitted.txt
)
job=${jobs[${SLURM_ARRAY_TASK_ID:-0}]}
[ -r "$job" ] || exit 73
exec bash "$job"
