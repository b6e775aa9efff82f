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
#SBATCH --segment=2
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
export GREETING='it'"'"'s $HOME'
export SRUN_CPUS_PER_TASK=8 # srun does not take it from sbatch

trireme_options=$(set +o)
trireme_stop() { # exit code, what failed, in which file that a line here reads
  [ -z "$3" ] || return 0 # it is the line here that has to end well
  trap - EXIT
  echo "error: cluster.setup stops at: $2 (exit code $1 on $(hostname))"
  exit 78
}
trap 'trireme_stop $? "$(sed -n "${LINENO}p" "$0")" "${BASH_SOURCE[1]-}"' ERR
trap 'trireme_stop $? "$BASH_COMMAND" ""' EXIT
module load cuda
export A="$(nproc)"
trap - ERR
[[ $(trap -p EXIT) != *trireme_stop* ]] || trap - EXIT
nvidia-smi
eval "$trireme_options" # and what follows is read as it was written
unset IFS

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

# Every node proves itself before it is trusted with a trial.
srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --kill-on-bad-exit=0 --wait=0 --unbuffered --distribution=block \
  --mpi=none \
  sh -c "$trireme_as_rank" rank "$trireme_log.health" "$trireme_snapshot" /venv/bin/python -u -P -m trainer.health "$trireme_log.bad-nodes" 4 $trireme_nodes || {
  trireme_code=$?
  [ -s "$trireme_log.bad-nodes" ] && echo "bad nodes: $(tr '\n' ' ' <"$trireme_log.bad-nodes")" && exit 69
  [ -n "$trireme_warned" ] || exit $trireme_code
}

trap 'trireme_interrupted=1 trireme_ended=1' TERM # Slurm itself ends the job: nothing is left to decide here
if [ -n "$trireme_warned" ]; then
  trireme_code=75 # the ranks have not begun
else
srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --kill-on-bad-exit=0 --wait=30 --unbuffered --distribution=block \
  --mpi=none \
  sh -c "$trireme_as_rank" rank "$trireme_log" "$trireme_snapshot" /venv/bin/python -u -P -m trainer "$trireme_trial/config.yaml" --out "$trireme_trial" --attempt "$trireme_attempt" &
trireme_ranks=$!
[ -z "$trireme_warned" ] || kill -USR2 $trireme_ranks # warned just now
while trireme_interrupted=; wait $trireme_ranks; trireme_code=$?; [ -n "$trireme_interrupted" ] && [ $trireme_code -gt 128 ]; do :; done
fi

if [ $trireme_code -eq 0 ] || [ -n "$trireme_ended" ] || { [ -z "$trireme_warned" ] && [ $trireme_code -ne 75 ]; }; then
  exit $trireme_code
fi
echo "stopped on request (code $trireme_code)"
if [ "${SLURM_RESTART_COUNT:-0}" -lt 0 ]; then
  for trireme_pause in 0 2 10 30; do
    sleep $trireme_pause
    scontrol requeue "$SLURM_JOB_ID" && break
  done
fi
exit 75
