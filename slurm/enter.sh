#!/bin/sh
# The first command inside a container of --container-command: enter.sh FOLDER COMMAND...
# FOLDER, the code, becomes the working directory. Images and runtimes may change every variable.
if [ -z "$SLURM_JOB_ID" ]; then
  echo "container command: SLURM_JOB_ID is not set inside" >&2
  exit 78
fi
cd "$1" || exit 78
export RLPOST_HOME="$1" PYTHONPATH="$1"
shift
exec "$@"
