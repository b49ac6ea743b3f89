#!/bin/bash
# Run a command in the container of this node's agent, with its environment: enroot_exec.sh NAME COMMAND...
set -eu
. "${BASH_SOURCE%/*}/enroot_node.sh"
name=$1_$node
shift
pid=$(process_of "$name")
if [ -z "$pid" ]; then
  echo "no process of the container $name runs on $node; see agent-$node.log of the attempt" >&2
  exit 1
fi
# The command gets the environment of that process, not of this one.
exec enroot exec -- "$pid" "$@"
