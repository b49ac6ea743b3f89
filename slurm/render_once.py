"""Render batch scripts of one-shot jobs: a conversion of weights, a check of an image. Pure.

Input: a ``JobSpec`` whose ``driver_args`` are the tool's arguments. Output: bash for ``sbatch``.
Such a job does not handle preemption: after a requeue it starts from scratch.
"""

from __future__ import annotations

from slurm.render import (
    chosen_words,
    directives,
    image,
    inside,
    places,
    preparation,
    removal,
    shell_word,
    submits_itself,
)
from slurm.spec import JobSpec


def render_conversion(spec: JobSpec, save: str) -> str:
    """Render the script that converts weights into ``save`` (rlpost/cli/convert.py).

    The shell expands a leading variable of ``save``. One torchrun runs per node, with one process
    per GPU. If ``save`` exists, the job ends at once. The job writes to a folder with its job id in
    the name, which it renames at the end, and removes only that folder: another conversion may be
    writing.
    """
    words = " ".join(map(shell_word, spec.driver_args))
    return f"""\
{_begin(spec)}\
save={shell_word(save)}
[ -e "$save" ] && log "$save is there; remove it to convert again" && exit 0
writing=$save.converting-$SLURM_JOB_ID
rm -rf -- "$writing"  # of this job before it was requeued
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=${{MASTER_ADDR:-${{hosts[0]}}}} port=${{MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}}

{_srun(spec)}bash "$RLPOST_HOME/slurm/torchrun.sh" "$python" {spec.num_gpus_per_node} "$address" "$port" \\
  -m rlpost.cli.convert to-torch-dist {words} \\
  --save "$writing" "$@"
code=$?
{removal(spec)}\
[ "$code" -eq 0 ] && mv -T -- "$writing" "$save" && log "$save is written" && exit 0
rm -rf -- "$writing"
log "not converted (exit $code); the end of $run_folder/*.log:"
tail -n 5 "$run_folder"/*.log
exit 1
"""


def render_look(spec: JobSpec) -> str:
    """Render the script that runs ``bootstrap.image.doctor`` where the job's agents would run.

    The output is the file ``findings`` in the run folder.
    """
    words = " ".join(map(shell_word, spec.driver_args))
    return f"""\
{_begin(spec)}
{_srun(spec)}"$python" -m bootstrap.image.doctor {words} --output "$run_folder/findings"
code=$?
{removal(spec)}\
exit "$code"
"""


def _begin(spec: JobSpec) -> str:
    before = (directives(spec, is_warned=False), _RENDERED, submits_itself(spec), _HEAD)
    container = (image(spec, "$run_folder/launch.log"), chosen_words(spec, "$run_folder"))
    return "".join((*before, places(spec, is_supervised=False), _FOLDER, *container))


def _srun(spec: JobSpec) -> str:
    """The srun command without the program that it runs."""
    return f"""\
srun --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none --mpi=none \\
  --output="${{run_folder//%/%%}}/%N.log" \\
{inside(spec)}  {preparation(spec, '"$RLPOST_HOME"')}"""


_RENDERED = """\
# Rendered by slurm/render_once.py; its docstrings give the reason for each step.
"""
_HEAD = """\
set -u; unset "${!SLURM_GPU@}" "${!SLURM_MEM@}" SLURM_{CPUS,NTASKS}_PER_GPU SLURM_EXPORT_ENV "${!SQUEUE_@}"
log() { echo "$(date '+%F %T') batch: $*"; }

"""

_FOLDER = """\
export RLPOST_HOME PYTHONPATH="$RLPOST_HOME"
mkdir -p "$run_folder" || exit 1
"""
