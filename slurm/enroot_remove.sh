#!/bin/bash
# One node, after its agent: remove what the agent's container leaves on the disk.
#   enroot_remove.sh enroot NAME    NAME_NODE; fails where it has to stay
#   enroot_remove.sh pyxis NAME     pyxis_NAME, which pyxis' default scope "global" leaves, and those of cancelled jobs.
#                                   Says nothing and never fails: with scope "job" there is none, nor need enroot be here.
set -u
. "${BASH_SOURCE%/*}/enroot_node.sh"

# Not under an agent that is still ending, whose files would vanish: it has 10 s.
remove() {
  local pid
  has_container "$1" || return 0
  for _ in {1..20}; do
    pid=$(process_of "$1")
    [ -n "$pid" ] || break
    sleep 0.5
  done
  if [ -n "$pid" ]; then
    echo "$node: process $pid still runs in the container $1, which stays" >&2
    return 1
  fi
  enroot remove --force -- "$1"
}

if [ "$1" = pyxis ]; then
  exec >/dev/null 2>&1
  unset "${!ENROOT_@}" # pyxis does not read the job's
  PATH=$PATH:/usr/local/bin:/usr/bin:/bin
  command -v enroot || exit 0
  remove "pyxis_$2"
  remove_stale "pyxis_rlpost_([0-9]+)_[0-9]+"
  exit 0
fi
remove "$2_$node"
