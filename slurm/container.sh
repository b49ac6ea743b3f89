#!/bin/bash
# Choose the container of a job: container.sh auto|pyxis|enroot [IMAGE [VARIABLE...]]
# VARIABLE: environment variables that must be set, with or without a container.
# Prints pyxis, enroot or none; standard error gets the choice and its reason. Exit 78: not available, with the remedy.
# auto is $RLPOST_CONTAINER. If unset: pyxis if srun has --container-image, else enroot if it is on the PATH, else
# none. Login nodes may lack the enroot that compute nodes have: outside a job a missing enroot is not an error.
set -u
say() { echo "$(date '+%F %T') container: $*" >&2; }
refuse() { say "$*" && exit 78; }
has_pyxis() { srun --help 2>/dev/null | grep -e --container-image >/dev/null; }
has_enroot() { command -v enroot >/dev/null; }

# RLPOST_CONTAINER applies to auto only.
backend=$1 image=${2:-} missing=$(for name in "${@:3}"; do [ "${!name:-}" ] || echo -n " $name"; done)
why='the cluster profile says so' none='--container none'
[ "${RLPOST_CONTAINER:-$backend}" = "$backend" ] || why="$why, RLPOST_CONTAINER=$RLPOST_CONTAINER has no effect"
if [ "$backend" = auto ]; then
  backend=${RLPOST_CONTAINER:-} why="RLPOST_CONTAINER=${RLPOST_CONTAINER:-}" none='RLPOST_CONTAINER=none'
  case $backend in
    pyxis | enroot | none) ;;
    '')
      if has_pyxis; then backend=pyxis why='srun --help lists --container-image'
      elif has_enroot; then backend=enroot why="enroot is on the PATH and srun has no --container-image"
      else backend=none why='srun has no --container-image and enroot is not on the PATH'; fi
      ;;
    *) refuse "RLPOST_CONTAINER=$backend is not a choice; use pyxis, enroot or none, or unset it to have it detected" ;;
  esac
  if [ "$backend" != none ] && [ -z "$image" ]; then
    say "RLPOST_IMAGE is not set, and the container is $backend ($why); export RLPOST_IMAGE=/path/image.sqsh (or a" \
      "name in a registry), or RLPOST_CONTAINER=none to run without a container"
    missing=" RLPOST_IMAGE$missing"
  fi
fi

[ -z "$missing" ] || refuse "not set:$missing; export before sbatch, or fill jobs/clusters/site.toml and make jobs"
[ "$backend" != pyxis ] || has_pyxis ||
  refuse "pyxis ($why): srun --help lists no --container-image on $(hostname), so this cluster has no pyxis;" \
    "choose enroot where it is installed, or $none"
[ "$backend" != enroot ] || [ -z "${SLURM_JOB_ID:-}" ] || has_enroot ||
  refuse "enroot ($why): enroot is not on the PATH of $(hostname); install it, or choose $none"
case $backend:$image in
  none:* | *:/* | *:) ;;
  *:*.sqsh | *:.*) refuse "RLPOST_IMAGE=$image: not an absolute path; use /path/image.sqsh" ;;
esac
[ "$backend" = none ] && [ "$image" ] && why="$why; the image $image is not used"
say "$backend: $why"
echo "$backend"
