#!/bin/bash
# One node, before its agent and inside the container if there is one: prepare.sh LINE... -- COMMAND...
# Each line is shell of its own; the first that fails ends the task. The command takes this shell's place.
while [ "$1" != -- ]; do
  eval "$1" || {
    echo "setup command failed: $1" >&2
    exit 1
  }
  shift
done
shift
exec "$@"
