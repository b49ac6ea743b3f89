#!/bin/bash
# A command in the container in which this node's agent runs, with the agent's environment: enroot_exec.sh NAME COMMAND...
set -eu
. "${BASH_SOURCE%/*}/enroot_node.sh"
name=$1_$node
shift
pid=$(process_of "$name")
if [ -z "$pid" ]; then
  echo "no process of the container $name runs on $node; see agent-$node.log of the attempt" >&2
  exit 1
fi
# The environment is that of the process, nothing of this one.
exec enroot exec -- "$pid" "$@"
