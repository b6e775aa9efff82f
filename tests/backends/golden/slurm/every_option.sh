#!/bin/bash
#SBATCH --job-name=trireme-ab12cd34ef56-0
#SBATCH --partition=batch
#SBATCH --account=nlp
#SBATCH --qos=high
#SBATCH --reservation=march
#SBATCH --time=90
#SBATCH --nodes=2
#SBATCH --ntasks=8
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:h100:4
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --constraint="h100&ib"
#SBATCH --nodelist=n[1-8]
#SBATCH --exclude=n7
#SBATCH --switches=1@10
#SBATCH --dependency=afterok:12
#SBATCH --comment="who says \"no\"?"
#SBATCH --mail-type=END
#SBATCH --mail-user=me@site
#SBATCH --signal=B:USR1@120
#SBATCH --exclusive
#SBATCH --no-requeue
#SBATCH --output=/dev/null
#SBATCH --licenses=scratch:1

# Attempt 0 of trial ab12cd34ef56. It can be submitted again by hand: sbatch THIS_FILE
trial=/shared/runs/trials/ab12cd34ef56
mkdir -p "$trial/logs"
# Every start is an attempt of its own, whatever Slurm remembers of earlier ones: it takes the first number that is free.
attempt=$((0 + ${SLURM_RESTART_COUNT:-0}))
until log=$trial/logs/attempt$attempt; (set -o noclobber; : >"$log.slurm.log") 2>/dev/null; do
  [ -e "$log.slurm.log" ] || exit 73
  attempt=$((attempt + 1))
done
exec >>"$log.slurm.log" 2>&1
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, attempt $attempt"
warned= ended= ranks=
# Slurm warns this shell of the end of its time or of a preemption; the ranks save a checkpoint and leave with code 75.
trap 'interrupted=1 warned=1; [ -z "$ranks" ] || kill -USR2 $ranks' USR1
if [ $attempt -gt 0 ] && grep -qs '"status": "done"' "$trial/result.json"; then
  echo "an earlier attempt has finished the trial" && exit
fi
code=/shared/runs/code/0123456789ab
unset PYTHONPATH # the launcher's own
export OMP_NUM_THREADS=1
export GREETING='it'"'"'s $HOME'
export SRUN_CPUS_PER_TASK=8 # srun does not take it from sbatch
module load cuda
export A="$(nproc)"

# The ranks meet on the first node, by its address where its name does not resolve, at a port of this job's own.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" || hostname)
MASTER_ADDR=${nodes%%[[:space:]]*}
getent hosts "$MASTER_ADDR" >/dev/null ||
  MASTER_ADDR=$(scontrol show node --oneliner "$MASTER_ADDR" | grep -o ' NodeAddr=[^ ]*' | cut -d= -f2)
MASTER_PORT=$((10000 + (SLURM_JOB_ID * 7 + ${SLURM_RESTART_COUNT:-0}) % 20000))
WORLD_SIZE=8
export MASTER_ADDR MASTER_PORT WORLD_SIZE

# A task becomes a rank: $1 is where its log begins, $2 where its code lies, the rest its command.
as_rank='log=$1; shift
  export PYTHONPATH=$1${PYTHONPATH:+:$PYTHONPATH}; shift
  rest=$((WORLD_SIZE - SLURM_NODEID * 4))
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$((rest < 4 ? rest : 4))
  exec "$@" >>"$log.rank$RANK.log" 2>&1'

# Every node proves itself before it is trusted with a trial.
srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --kill-on-bad-exit=0 --wait=0 --unbuffered --distribution=block \
  --mpi=none \
  sh -c "$as_rank" rank "$log.health" "$code" /venv/bin/python -u -P -m trainer.health "$log.bad-nodes" 4 $nodes || {
  code=$?
  [ -s "$log.bad-nodes" ] && echo "bad nodes: $(tr '\n' ' ' <"$log.bad-nodes")" && exit 69
  [ -n "$warned" ] || exit $code
}

trap 'interrupted=1 ended=1' TERM # Slurm itself ends the job: nothing is left to decide here
if [ -n "$warned" ]; then
  code=75 # the ranks have not begun
else
srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --kill-on-bad-exit=0 --wait=30 --unbuffered --distribution=block \
  --mpi=none \
  sh -c "$as_rank" rank "$log" "$code" /venv/bin/python -u -P -m trainer "$trial/config.yaml" --out "$trial" --attempt "$attempt" &
ranks=$!
[ -z "$warned" ] || kill -USR2 $ranks # warned just now
while interrupted=; wait $ranks; code=$?; [ -n "$interrupted" ] && [ $code -gt 128 ]; do :; done
fi

if [ $code -eq 0 ] || [ -n "$ended" ] || { [ -z "$warned" ] && [ $code -ne 75 ]; }; then
  exit $code
fi
echo "stopped on request (code $code)"
if [ "${SLURM_RESTART_COUNT:-0}" -lt 0 ]; then
  for pause in 0 2 10 30; do
    sleep $pause
    scontrol requeue "$SLURM_JOB_ID" && break
  done
fi
exit 75
