#!/bin/bash
# One node's agent in a container of raw enroot: enroot_start.sh IMAGE NAME MOUNT... -- COMMAND...
# Extracts the image under the job's own name first: a mounted .sqsh dies of the signals that Slurm sends to a step.
# The agent takes this shell's place, for under proctrack/cgroup only the task itself gets those signals.
set -eu
image=$1 name=$2
shift 2
options=()
while [ "$1" != -- ]; do
  options+=(--mount "$1")
  shift
done
shift
# What an earlier start of this job left, if it was killed.
for left in $(enroot list); do
  case $left in "rlpost_${SLURM_JOB_ID}_"*) enroot remove --force -- "$left" ;; esac
done
enroot create --name "$name" -- "$image"
# Only what is named gets in.
for variable in "${!SLURM@}" "${!NVIDIA_@}" "${!CUDA_VISIBLE_@}" "${!RLPOST_@}" PYTHONPATH; do
  options+=(--env "$variable")
done
exec enroot start --rw --rc "$RLPOST_HOME/slurm/enroot_rc.sh" "${options[@]}" -- "$name" "$@"
