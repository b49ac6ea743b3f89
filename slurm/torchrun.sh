#!/bin/bash
# Start torchrun on one node of a conversion: torchrun.sh PYTHON PROCESSES ADDRESS PORT COMMAND...
# SLURM_NODEID is known only inside the step. With an explicit node rank, torchrun uses the given address; its c10d
# rendezvous would let each node compare host names to find out whether it is the master.
set -eu
python=$1 processes=$2 address=$3 port=$4
shift 4
exec "$python" -m torch.distributed.run --nnodes="$SLURM_STEP_NUM_NODES" --node-rank="$SLURM_NODEID" \
  --nproc-per-node="$processes" --master-addr="$address" --master-port="$port" "$@"
