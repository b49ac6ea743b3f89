#!/bin/bash
# One node's part of a conversion: torchrun.sh PYTHON PROCESSES ADDRESS PORT COMMAND...
# Only the step itself knows a node's rank. With a rank torchrun meets at the address that is given; its other way,
# c10d, has each node guess by host names whether it is the first.
set -eu
python=$1 processes=$2 address=$3 port=$4
shift 4
exec "$python" -m torch.distributed.run --nnodes="$SLURM_STEP_NUM_NODES" --node-rank="$SLURM_NODEID" \
  --nproc-per-node="$processes" --master-addr="$address" --master-port="$port" "$@"
