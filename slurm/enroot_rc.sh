#!/bin/sh
# Replaces the image's entrypoint in the container, which may print, fork or change the directory.
cd "$RLPOST_HOME" && exec "$@"
