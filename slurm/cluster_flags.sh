#!/bin/bash
# Refuse flags that come too late: cluster_flags.sh WORD...   Exit 78 with one line for each, and its remedy.
# Written by tools/make_jobs.py from tools/late_flags.py, which says why they are too late.
code=0
while [ $# -gt 0 ]; do
  flag=${1%%=*} value='' remedy=''
  case $1 in *=*) value=${1#*=} ;; *) [[ ${2:---} == --* ]] || value=$2 ;; esac
  case $flag in
    --account | --constraint | --exclude | --job-name | \
      --partition | --qos | --reservation | --time)
      remedy="sbatch $flag=${value:-VALUE} FILE" ;;
    --assets-dir)
      remedy="export RLPOST_ASSETS=..." ;;
    --container)
      remedy="export RLPOST_CONTAINER=..." ;;
    --container-image)
      remedy="export RLPOST_IMAGE=..." ;;
    --image-cache)
      remedy="export RLPOST_IMAGE_CACHE=..." ;;
    --python)
      remedy="export RLPOST_PYTHON=..." ;;
    --run-folder)
      remedy="export RLPOST_RUN_FOLDER=..." ;;
    --runs-dir)
      remedy="export RLPOST_RUN_FOLDER=..." ;;
    --bringup-deadline-s | --cluster | --container-mounts | --environment | \
      --exclusive | --gpu-request | --max-driver-restarts | --max-failures | \
      --max-preemptions | --max-stalled-attempts | --nodes | --num-gpus-per-node | \
      --preflight-bandwidth-gbps | --ray-dashboard | --ray-dashboard-host | --ray-object-store-memory | \
      --requeue | --setup-commands | --signal-lead-s | --socket-ifname | \
      --spare-nodes)
      remedy="rlpost submit, or site.toml in jobs/clusters and make jobs" ;;
  esac
  if [ "$remedy" ]; then
    echo "$flag${value:+ $value}: decided when the batch file is rendered, no effect after its name; use $remedy" >&2
    code=78
  fi
  shift
done
exit "$code"
