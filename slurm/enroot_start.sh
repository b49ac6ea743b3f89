#!/bin/bash
# Run one node's agent in a raw enroot container: enroot_start.sh IMAGE NAME MOUNT... -- COMMAND...
# The image is extracted as NAME_NODE first: a signal to the step would kill the process that mounts a .sqsh.
# The agent replaces this shell (exec), because under proctrack/cgroup only the task itself gets those signals.
set -eu
. "$RLPOST_HOME/slurm/enroot_node.sh"
image=$1 name=$2_$node
shift 2
options=()
while [ "$1" != -- ]; do
  options+=(--mount "$1")
  shift
done
shift
# Remove the containers of killed starts on this node: a cancelled job cannot start a step for that.
remove_stale "rlpost_([0-9]+)_[0-9]+_${node//./[.]}"
enroot create --name "$name" -- "$image"
# enroot passes only the variables that are named.
for variable in "${!SLURM@}" "${!NVIDIA_@}" "${!CUDA_VISIBLE_@}" "${!RLPOST_@}" PYTHONPATH; do
  options+=(--env "$variable")
done
exec enroot start --rw --rc "$RLPOST_HOME/slurm/enroot_rc.sh" "${options[@]}" -- "$name" "$@"
