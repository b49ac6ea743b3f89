"""Render the batch script of a fleet's engine jobs, an array of independent tasks. Pure.

Input: a ``JobSpec`` whose ``agent_args`` are the arguments of ``rlpost.fleet.agent``, and the
number of engines. Output: bash for ``sbatch``.

Each task of the array is one engine on its own node, and restarts independently. ``render`` gives
the reasons for what this script has in common with a run's. In addition:

- The name of an engine is that of its task, ``JOB_TASK``, also after a requeue. SLURM_JOB_ID is
  another number for each task, so containers of two tasks on a node have different names. Slurm's
  commands get the name: the last task has the number of the array, which means all tasks there.
- USR2 (the time limit, or a preemption where the site sends it) reaches the batch shell alone,
  which announces the end in RUN/fleet/stop/NAME; TERM to the step reaches the agent itself.
- The agent's exit code determines what follows. 0: the engine is not needed any more (the run has
  ended, or the user drained it). 75: it was preempted and is requeued. Anything else is a failure,
  after which ``max_failures`` bounds the restarts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.exit_codes import EXIT_PREEMPTED
from slurm.errors import SpecError
from slurm.render import (
    chosen_words,
    directives,
    image,
    inside,
    places,
    preparation,
    removal,
    shell_word,
    stop_writer,
)
from slurm.spec import JobSpec

MAX_TASKS = 1000  # MaxArraySize is 1001 by default (man slurm.conf)


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """An array of engine jobs.

    Attributes:
        job: one engine's job; ``run_folder``, ``home`` and ``python`` are set.
        num_engines: tasks of the array.
        after: id of the job after whose start they may start; None for at once.

    Raises:
        SpecError: names the field, its value and the allowed values.
    """

    job: JobSpec
    num_engines: int
    after: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_engines <= MAX_TASKS:
            raise SpecError(
                f"engines: {self.num_engines}; use 1 to {MAX_TASKS}, and call again for more"
            )
        if self.job.nodes != 1 or self.job.spare_nodes:
            raise SpecError(
                f"nodes: {self.job.nodes} and {self.job.spare_nodes} spare; an engine of a fleet has "
                "one node; use --rollout-num-gpus-per-engine of at most --num-gpus-per-node"
            )
        if not (self.job.run_folder and self.job.home):
            raise SpecError("run_folder, home: a fleet belongs to a run that exists")
        if self.job.requeue == "chain":
            raise SpecError("requeue: 'chain' is for the run itself; an engine restarts by requeue")


def render_fleet(spec: FleetSpec) -> str:
    """Render the batch script of the engine jobs."""
    job = spec.job
    array = [[f"--array=0-{spec.num_engines - 1}"]]
    if spec.after is not None:
        # A requeue of the run's job does not restore the dependency: engines wait for the run
        # instead.
        array.append([f"--dependency=after:{spec.after}"])
    parts = (
        directives(job, first=array),
        _HEAD,
        places(job, is_supervised=False),
        _TASK,
        image(job, "$logs.launch"),
    )
    return "".join((*parts, _stop(job), chosen_words(job, "$logs.d"), _command(job), _end(job)))


def task_name(job_id: str, task: int) -> str:
    """Return the name of an engine; also Slurm's name of the task."""
    return f"{job_id}_{task}"


def job_and_task(engine: str) -> tuple[str, int] | None:
    """Return the job and the task of an engine's name; None if it is not one of an array."""
    found = re.fullmatch(r"(\d+)_(\d+)", engine, re.ASCII)
    return (found[1], int(found[2])) if found else None


_HEAD = """\
# Rendered by slurm/render_fleet.py; its docstring gives the reason for each step.
set -u; umask 077; unset "${!SLURM_GPU@}" "${!SLURM_MEM@}" SLURM_{CPUS,NTASKS}_PER_GPU SLURM_EXPORT_ENV "${!SQUEUE_@}"
engine=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
log() { echo "$(date '+%F %T') engine $engine: $*"; }
job_end() { SLURM_TIME_FORMAT=%s timeout 10 squeue -h -j "$engine" -o %e; } # a preemption moves it
stopped='' terminated=''; trap 'stopped=early' USR2
trap 'terminated=1; log "TERM: cancelled, or grace time over"' TERM
"""

_TASK = """\
SLURM_JOB_END_TIME=$(job_end); export SLURM_JOB_END_TIME RLPOST_HOME PYTHONPATH="$RLPOST_HOME"
stop_file=$run_folder/fleet/stop/$engine logs=$run_folder/fleet/logs/$engine
mkdir -p "$logs.d" && rm -f -- "$stop_file" || exit 1
log "job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST"
"""


_NEVER = """\
log "not requeued${terminated:+ after TERM}: --requeue never"; exit "$code"
"""


def _stop(job: JobSpec) -> str:
    temporary = '"$stop_file.new"'
    put = f'mv -f {temporary} "$stop_file"'
    return stop_writer(job, "the engine leaves", temporary=temporary, put=put)


def _command(job: JobSpec) -> str:
    words = " ".join(map(shell_word, job.agent_args))
    ready = preparation(job, '"$RLPOST_HOME"')
    return f"""\
srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --mpi=none \\
  --output="${{logs//%/%%}}.log" --open-mode=append 2>>"$logs.launch" \\
{inside(job)}  {ready}"$python" -u -m rlpost.fleet.agent --run-folder "$run_folder" --engine "$engine" \\
  --stop-file "$stop_file"{" " + words if words else ""} &
srun_pid=$! code=0
# A signal interrupts wait, not srun.
while kill -0 "$srun_pid" 2>/dev/null; do sleep 1 & wait -n "$srun_pid" "$!"; done
wait "$srun_pid" || code=$?
"""


def _end(job: JobSpec) -> str:
    again = f"""\
[ "$code" = {EXIT_PREEMPTED} ] || failures=$(($(cat "$logs.d/failures" 2>/dev/null || echo 0) + 1))
[ "$code" = {EXIT_PREEMPTED} ] || echo "$failures" >"$logs.d/failures"
[ "${{failures:-0}}" -gt {job.max_failures} ] && log "not requeued: $failures failures" && exit "$code"
for _ in {{1..30}}; do state=$(timeout 10 squeue -h -j "$engine" -o %T) && break; sleep 2; done
[ "$state" != RUNNING ] && log "not requeued: job state is ${{state:-unknown}}" && exit "$code"
[ "$terminated" ] && log "not requeued: the batch script got TERM" && exit "$code"
log "requeue: task $engine"; trap '' TERM # requeue sends it
scontrol requeue "$engine" || exit "$code"
"""
    return f"""\
log "the agent ended (srun exit $code)"
{removal(job)}\
rm -f -- "$stop_file"
[ "$code" = 0 ] && exit 0
{again if job.requeue == "requeue" else _NEVER}"""
