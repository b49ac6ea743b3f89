#!/bin/bash
# Debian packages for the tests on a real Slurm and in a real browser (chromium: 113 MB to download, 414 MB installed).
# As root on Debian or Ubuntu, install them; otherwise list them.
set -euo pipefail
packages=(slurm-wlm munge iproute2 shellcheck bindfs debootstrap)
programs=(slurmctld munged ip shellcheck bindfs debootstrap)
missing=()
for index in "${!packages[@]}"; do
    command -v "${programs[$index]}" > /dev/null || missing+=("${packages[$index]}")
done
browser=chromium
for program in chromium chromium-browser google-chrome chrome; do
    if command -v "$program" > /dev/null; then browser=; fi
done
charliecloud=charliecloud # one test runs a real container with it
if command -v ch-run > /dev/null; then charliecloud=; fi
promtool=promtool
if command -v promtool > /dev/null; then promtool=; fi
[ "${#missing[@]}" -gt 0 ] || [ -n "$browser$charliecloud$promtool" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    echo "install: ${missing[*]} $browser $charliecloud $promtool"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    if [ "${#missing[@]}" -gt 0 ]; then
        apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
    fi
    if [ -n "$browser" ]; then # on Ubuntu, chromium is available as a snap only
        apt-get install -y -qq --no-install-recommends "$browser" > /dev/null ||
            echo "no package $browser here; tests in a browser will be skipped"
    fi
    if [ -n "$charliecloud" ]; then
        apt-get install -y -qq --no-install-recommends "$charliecloud" > /dev/null ||
            echo "no package $charliecloud here; the test with it will be skipped"
    fi
    if [ -n "$promtool" ]; then # alone: the package would start a server as well
        folder=$(mktemp -d)
        if (cd "$folder" && apt-get download -qq prometheus && dpkg-deb --extract prometheus_*.deb .) > /dev/null 2>&1; then
            install -m 755 "$folder/usr/bin/promtool" /usr/local/bin/promtool
        else
            echo "no package prometheus here; the test with promtool will be skipped"
        fi
        rm -rf "$folder"
    fi
else
    echo "missing: ${missing[*]} $browser $charliecloud $promtool; tests that need them will be skipped (install them as root, e.g. with apt-get)"
fi
