#!/bin/bash
# One node's agent in a container of raw enroot: enroot_start.sh IMAGE NAME MOUNT... -- COMMAND...
# Extracts the image as NAME_NODE first: a mounted .sqsh dies of the signals that Slurm sends to a step.
# The agent takes this shell's place, for under proctrack/cgroup only the task itself gets those signals.
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
# What this node's killed starts left: a cancelled job can start no step that would remove anything.
remove_stale "rlpost_([0-9]+)_[0-9]+_${node//./[.]}"
enroot create --name "$name" -- "$image"
# Only what is named gets in.
for variable in "${!SLURM@}" "${!NVIDIA_@}" "${!CUDA_VISIBLE_@}" "${!RLPOST_@}" PYTHONPATH; do
  options+=(--env "$variable")
done
exec enroot start --rw --rc "$RLPOST_HOME/slurm/enroot_rc.sh" "${options[@]}" -- "$name" "$@"
