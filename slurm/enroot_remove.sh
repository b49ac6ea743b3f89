#!/bin/bash
# Remove the files of the agent's container from one node after the agent has ended.
#   enroot_remove.sh enroot NAME    removes NAME_NODE; fails if a process still runs in it
#   enroot_remove.sh pyxis NAME     removes pyxis_NAME, which remains with pyxis' default scope "global", and those of
#                                   cancelled jobs. Silent, never fails: with scope "job" there is no such container,
#                                   and enroot may not be installed.
set -u
. "${BASH_SOURCE%/*}/enroot_node.sh"

# Wait up to 10 s for an agent that is still ending: removal would delete its files.
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
  unset "${!ENROOT_@}" # pyxis does not use the job's variables
  PATH=$PATH:/usr/local/bin:/usr/bin:/bin
  command -v enroot || exit 0
  remove "pyxis_$2"
  remove_stale "pyxis_rlpost_([0-9]+)_[0-9]+"
  exit 0
fi
remove "$2_$node"
