#!/bin/bash
# One node, after its agent: remove what the agent's container leaves on the disk. enroot_remove.sh BACKEND NAME
# enroot: NAME_NODE; fails if it is left. pyxis, with its default scope "global": pyxis_NAME, and those of jobs that were
# cancelled; never fails, for with scope "job" pyxis removes its containers itself, and enroot need not be on PATH.
set -u
. "${BASH_SOURCE%/*}/enroot_node.sh"
backend=$1 name=$2_$node
if [ "$backend" = pyxis ]; then
  name=pyxis_$2
  unset "${!ENROOT_@}" # pyxis does not read the job's
  PATH=$PATH:/usr/local/bin:/usr/bin:/bin
fi
command -v enroot >/dev/null || exit 0
if has_container "$name"; then
  # Not under an agent that is still ending: its files would vanish.
  for _ in {1..20}; do
    pid=$(process_of "$name")
    [ -n "$pid" ] || break
    sleep 0.5
  done
  if [ -n "$pid" ]; then
    echo "$node: process $pid still runs in the container $name, which stays" >&2
    [ "$backend" = pyxis ]
    exit
  fi
  enroot remove --force -- "$name" || [ "$backend" = pyxis ] || exit 1
fi
[ "$backend" = enroot ] || remove_stale "pyxis_rlpost_([0-9]+)_[0-9]+"
