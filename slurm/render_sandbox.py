"""Render the batch script of sandbox servers: an array of tasks on nodes of a CPU partition. Pure.

Input: a ``JobSpec`` without GPUs and the size of a server. Output: bash for ``sbatch``.

Each task of the array is one server (``rlpost.agents.sandbox.server``), restarts independently, and
belongs to a run: it ends (exit 0) when the run's driver closes its lease or is gone. A preempted
server exits with 75 and is requeued; the driver notices the loss of its sandboxes at once and
repeats their work elsewhere. After a failure it is requeued ``max_failures`` times at most.

The server runs on the node itself, not in a container: it makes the namespaces of its sandboxes. An
image is unpacked by enroot there, or is a folder.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.exit_codes import EXIT_CONFIG, EXIT_PREEMPTED
from slurm.errors import SpecError
from slurm.render import directives, places, shell_word
from slurm.render_fleet import MAX_TASKS
from slurm.spec import JobSpec


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """An array of sandbox servers.

    Attributes:
        job: one server's job; ``run_folder``, ``home`` and ``python`` are set.
        num_servers: tasks of the array.
        places: sandboxes of one server at a time.
        warm: sandboxes that a server prepares in advance.
        cores: CPUs of one server.
        memory_mib: memory of one server, for all places; 0: the partition's default.
        image: folder or .sqsh file; None: the node's own /usr.
        read_only: further folders that commands may read.
        after: job id of the run; servers start when it has started.

    Raises:
        SpecError: names the field, its value and the allowed values.
    """

    job: JobSpec
    num_servers: int
    places: int
    warm: int = 1
    cores: int = 1
    memory_mib: int = 0
    image: str | None = None
    read_only: tuple[str, ...] = ()
    after: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_servers <= MAX_TASKS:
            raise SpecError(f"num_servers: {self.num_servers}; use 1 to {MAX_TASKS}")
        for name in ("places", "cores"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name}: {getattr(self, name)}; use 1 or more")
        if self.warm < 0 or self.memory_mib < 0:
            raise SpecError(f"warm, memory_mib: {self.warm}, {self.memory_mib}; use 0 or more")
        if self.job.nodes != 1 or self.job.spare_nodes or self.job.gpu_request != "none":
            raise SpecError("nodes, gpu_request: a sandbox server has one node and no GPU")
        if self.job.container is not None:
            raise SpecError("container: a sandbox server runs on the node; its image is `image`")
        if not (self.job.run_folder and self.job.home and self.job.python):
            raise SpecError("run_folder, home, python: sandbox servers belong to a run")
        if self.job.requeue == "chain":
            raise SpecError("requeue: 'chain' is for the run itself; a server restarts by requeue")
        for path in (self.image or "", *self.read_only):
            if not path.isprintable():
                raise SpecError(f"image, read_only: {path!r} contains a control character")
        if self.after is not None and not self.after.isdecimal():
            raise SpecError(f"after: {self.after!r} is not the number of a job")


def render_sandbox(spec: SandboxSpec) -> str:
    """Render the batch script of the servers."""
    job = spec.job
    array = [f"--array=0-{spec.num_servers - 1}", f"--cpus-per-task={spec.cores}"]
    if spec.memory_mib and not job.exclusive:
        array.append(f"--mem={spec.memory_mib}M")
    if spec.after is not None:
        array.append(f"--dependency=after:{spec.after}")
    before = (directives(job, first=[array]), _HEAD, places(job, is_supervised=False))
    return "".join((*before, _command(spec), _end(job)))


_HEAD = """\
# Rendered by slurm/render_sandbox.py; its docstring gives the reason for each step.
set -u; umask 077; unset "${!SLURM_MEM@}" SLURM_EXPORT_ENV
server=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID terminated=''
log() { echo "$(date '+%F %T') sandbox server $server: $*"; }
srun_pid=''; trap '[ -z "$srun_pid" ] || kill -USR2 "$srun_pid"' USR2
trap 'terminated=1; log "TERM: cancelled, or grace time over"' TERM
"""


def _command(spec: SandboxSpec) -> str:
    words = [f"--places {spec.places}", f"--warm {spec.warm}"]
    if spec.image is not None:
        words.append(f"--image {shell_word(spec.image)}")
    words += [f"--read-only {shell_word(path)}" for path in spec.read_only]
    return f"""\
logs=$run_folder/sandboxes/logs; mkdir -p "$logs" || exit 1; export PYTHONPATH="$RLPOST_HOME"
log "job $SLURM_JOB_ID, start ${{SLURM_RESTART_COUNT:-0}} on $SLURM_JOB_NODELIST"
srun --ntasks-per-node=1 --cpus-per-task={spec.cores} --kill-on-bad-exit=0 --wait=0 --mpi=none \\
  --output="${{logs//%/%%}}/$server.log" --open-mode=append 2>>"$logs/$server.launch" \\
  "$python" -u -m rlpost.agents.sandbox.server --run-folder "$run_folder" --name "$server" \\
  {" ".join(words)} &
srun_pid=$! code=0
# A signal interrupts wait, not srun.
while kill -0 "$srun_pid" 2>/dev/null; do sleep 1 & wait -n "$srun_pid" "$!"; done
wait "$srun_pid" || code=$?
log "the server ended (srun exit $code)"
rm -f -- "$run_folder/sandboxes/nodes/$server.json"
[ "$code" = 0 ] && exit 0
[ "$code" = {EXIT_CONFIG} ] && exit {EXIT_CONFIG}
"""


def _end(job: JobSpec) -> str:
    if job.requeue == "never":
        return 'log "not requeued${terminated:+ after TERM}: --requeue never"; exit "$code"\n'
    return f"""\
failed=$logs/$server.failures
[ "$code" = {EXIT_PREEMPTED} ] || echo $(($(cat "$failed" 2>/dev/null || echo 0) + 1)) >"$failed"
[ "$(cat "$failed" 2>/dev/null || echo 0)" -gt {job.max_failures} ] && log "not requeued: failures" && exit "$code"
[ "$terminated" ] && log "not requeued: the batch script got TERM" && exit "$code"
log "requeue: job $SLURM_JOB_ID"; trap '' TERM # requeue sends it
scontrol requeue "$SLURM_JOB_ID" || exit "$code"
"""
