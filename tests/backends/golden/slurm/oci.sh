#!/bin/bash
#SBATCH --job-name=trireme-ab12cd34ef56-0
#SBATCH --nodes=2
#SBATCH --ntasks=8
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --comment="trireme sweep demo"
#SBATCH --signal=B:USR1@120
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --output=/dev/null

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

# The ranks meet on the first node, by its address where its name does not resolve, at a port of this job's own.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" || hostname)
MASTER_ADDR=${nodes%%[[:space:]]*}
getent hosts "$MASTER_ADDR" >/dev/null ||
  MASTER_ADDR=$(scontrol show node --oneliner "$MASTER_ADDR" | grep -o ' NodeAddr=[^ ]*' | cut -d= -f2)
MASTER_PORT=$((10000 + (SLURM_JOB_ID * 7 + ${SLURM_RESTART_COUNT:-0}) % 20000))
WORLD_SIZE=8
export MASTER_ADDR MASTER_PORT WORLD_SIZE

# A task starts the ranks of its node. The signal that asks them for a checkpoint would kill torchrun itself.
as_node='trap "" USR2; exec "$@"'
as_rank='log=$1; shift
  export PYTHONPATH=$1${PYTHONPATH:+:$PYTHONPATH}; shift
  exec "$@" >>"$log.rank$RANK.log" 2>&1'

trap 'interrupted=1 ended=1' TERM # Slurm itself ends the job: nothing is left to decide here
if [ -n "$warned" ]; then
  code=75 # the ranks have not begun
else
srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=4 --kill-on-bad-exit=0 --wait=30 --unbuffered --distribution=block \
  --container=/images/bundle \
  sh -c "$as_node" node /venv/bin/python -m torch.distributed.run --nnodes=2 --nproc-per-node=4 --max-restarts=0 --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-id="$SLURM_JOB_ID.$attempt" --no-python \
  sh -c "$as_rank" rank "$log" "$code" /venv/bin/python -u -P -m trainer "$trial/config.yaml" --out "$trial" --attempt "$attempt" &
ranks=$!
[ -z "$warned" ] || kill -USR2 $ranks # warned just now
while interrupted=; wait $ranks; code=$?; [ -n "$interrupted" ] && [ $code -gt 128 ]; do :; done
fi

if [ $code -eq 0 ] || [ -n "$ended" ] || { [ -z "$warned" ] && [ $code -ne 75 ]; }; then
  exit $code
fi
echo "stopped on request (code $code)"
if [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then
  for pause in 0 2 10 30; do
    sleep $pause
    scontrol requeue "$SLURM_JOB_ID" && break
  done
fi
exit 75
