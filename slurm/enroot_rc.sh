#!/bin/sh
# Runs in the container in place of the image's entrypoint, which may print, fork or change folders.
cd "$RLPOST_HOME" && exec "$@"
