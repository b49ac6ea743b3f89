#!/bin/bash
# Debian packages for the tests on a real Slurm: as root on Debian or Ubuntu they are installed, elsewhere named.
set -euo pipefail
packages=(slurm-wlm munge iproute2 shellcheck)
programs=(slurmctld munged ip shellcheck)
missing=()
for index in "${!packages[@]}"; do
    command -v "${programs[$index]}" > /dev/null || missing+=("${packages[$index]}")
done
[ "${#missing[@]}" -gt 0 ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    echo "install: ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
else
    echo "missing: ${missing[*]}; tests on a real Slurm will be skipped (install them as root, e.g. with apt-get)"
fi
