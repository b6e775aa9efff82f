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
trireme_trial=/shared/runs/trials/ab12cd34ef56
mkdir -p "$trireme_trial/logs"
# Every start is an attempt of its own, whatever Slurm remembers of earlier ones: it takes the first number that is free.
trireme_attempt=$((0 + ${SLURM_RESTART_COUNT:-0}))
until trireme_log=$trireme_trial/logs/attempt$trireme_attempt; (set -o noclobber; : >"$trireme_log.slurm.log") 2>/dev/null; do
  [ -e "$trireme_log.slurm.log" ] || exit 73
  trireme_attempt=$((trireme_attempt + 1))
done
exec >>"$trireme_log.slurm.log" 2>&1
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, attempt $trireme_attempt"
trireme_warned= trireme_ended= trireme_ranks=
# Slurm warns this shell of the end of its time or of a preemption; the ranks save a checkpoint and leave with code 75.
trap 'trireme_interrupted=1 trireme_warned=1; [ -z "$trireme_ranks" ] || kill -USR2 $trireme_ranks' USR1
if [ $trireme_attempt -gt 0 ] && grep -qs '"status": "done"' "$trireme_trial/result.json"; then
  echo "an earlier attempt has finished the trial" && exit
fi
trireme_snapshot=/shared/runs/code/0123456789ab
unset PYTHONPATH # the launcher's own
export OMP_NUM_THREADS=1

# The ranks meet on the first node, by its address where its name does not resolve, at a port of this job's own.
trireme_nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" || hostname)
MASTER_ADDR=${trireme_nodes%%[[:space:]]*}
getent hosts "$MASTER_ADDR" >/dev/null ||
  MASTER_ADDR=$(scontrol show node --oneliner "$MASTER_ADDR" | grep -o ' NodeAddr=[^ ]*' | cut -d= -f2)
MASTER_PORT=$((10000 + (SLURM_JOB_ID * 7 + ${SLURM_RESTART_COUNT:-0}) % 20000))
WORLD_SIZE=8
export MASTER_ADDR MASTER_PORT WORLD_SIZE

# A task becomes a rank: $1 is where its log begins, $2 where its code lies, the rest its command.
trireme_as_rank='trireme_log=$1; shift
  export PYTHONPATH=$1${PYTHONPATH:+:$PYTHONPATH}; shift
  trireme_rest=$((WORLD_SIZE - SLURM_NODEID * 4))
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$((trireme_rest < 4 ? trireme_rest : 4))
  exec "$@" >>"$trireme_log.rank$RANK.log" 2>&1'

trap 'trireme_interrupted=1 trireme_ended=1' TERM # Slurm itself ends the job: nothing is left to decide here
if [ -n "$trireme_warned" ]; then
  trireme_code=75 # the ranks have not begun
else
srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --kill-on-bad-exit=0 --wait=30 --unbuffered --distribution=block \
  sh -c "$trireme_as_rank" rank "$trireme_log" "$trireme_snapshot" /venv/bin/python -u -P -m trainer "$trireme_trial/config.yaml" --out "$trireme_trial" --attempt "$trireme_attempt" &
trireme_ranks=$!
[ -z "$trireme_warned" ] || kill -USR2 $trireme_ranks # warned just now
while trireme_interrupted=; wait $trireme_ranks; trireme_code=$?; [ -n "$trireme_interrupted" ] && [ $trireme_code -gt 128 ]; do :; done
fi

if [ $trireme_code -eq 0 ] || [ -n "$trireme_ended" ] || { [ -z "$trireme_warned" ] && [ $trireme_code -ne 75 ]; }; then
  exit $trireme_code
fi
echo "stopped on request (code $trireme_code)"
if [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then
  for trireme_pause in 0 2 10 30; do
    sleep $trireme_pause
    scontrol requeue "$SLURM_JOB_ID" && break
  done
fi
exit 75
