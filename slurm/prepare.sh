#!/bin/bash
# Run the setup commands of one node, inside its container if any, then its agent: prepare.sh LINE... -- COMMAND...
# Each LINE is a shell command; the first failure ends the task. COMMAND replaces this shell (exec).
while [ "$1" != -- ]; do
  eval "$1" || {
    echo "setup command failed: $1" >&2
    exit 1
  }
  shift
done
shift
exec "$@"
