"""A job spec as the text of a batch script. Pure.

Comes in: a ``JobSpec``. Goes out: bash for ``sbatch``, at most 80 lines, that ``shellcheck`` passes.

The script starts one agent a node under one ``srun``, turns Slurm's signals into the STOP file and acts on the one
word that the agents leave (``bootstrap/handoff.py``). What it knows that the agents cannot:

- USR2 (time limit near, or preemption where the site sends the job's signal) reaches the batch shell alone.
- TERM to the batch shell means that somebody cancelled the job, or that the end of the grace time has come and Slurm
  requeues by itself. A cancelled job must not come back, so after TERM the script never requeues.
- srun turns TERM into KILL for all its tasks (slurm, src/srun/signals.c): the script never signals it.
- Slurm 22.05 does not requeue a preempted job that ended by itself within its grace time: the script must.

A spec without ``home``, ``python`` and ``run_folder`` gives a script that finds them itself, for plain
``sbatch jobs/NAME.sbatch`` from the project's folder; RLPOST_HOME, RLPOST_PYTHON and RLPOST_RUN_FOLDER override.
"""

from __future__ import annotations

import shlex

from slurm.spec import JobSpec


def render_sbatch(spec: JobSpec) -> str:
    """The batch script for this job."""
    return _directives(spec) + _PREAMBLE + _places(spec) + _ATTEMPT + _command(spec) + _WAIT_AND_DECIDE


def _directives(spec: JobSpec) -> str:
    options = [f"--job-name={spec.job_name}", f"--nodes={spec.nodes}", "--ntasks-per-node=1", "--exclusive", "--mem=0"]
    if spec.gpu_request == "gres":
        options.append(f"--gres=gpu:{spec.num_gpus_per_node}")
    elif spec.gpu_request == "gpus-per-node":
        options.append(f"--gpus-per-node={spec.num_gpus_per_node}")
    options.append(f"--time={spec.time}")
    options += [f"--{name}={value}" for name in ("partition", "account") if (value := getattr(spec, name)) is not None]
    options += [f"--signal=B:USR2@{spec.signal_lead_s}", "--requeue", "--open-mode=append"]
    options.append(f"--output={shlex.quote(spec.output or 'slurm-%j.out')}")
    return "#!/bin/bash\n" + "".join(f"#SBATCH {option}\n" for option in options)


def _places(spec: JobSpec) -> str:
    home = shlex.quote(spec.home) if spec.home else "${RLPOST_HOME:-$SLURM_SUBMIT_DIR}"
    python = shlex.quote(spec.python) if spec.python else "${RLPOST_PYTHON:-$RLPOST_HOME/.venv/bin/python}"
    derived = f"${{RLPOST_RUN_FOLDER:-$RLPOST_HOME/runs/{spec.job_name}-$SLURM_JOB_ID}}"
    run_folder = shlex.quote(spec.run_folder) if spec.run_folder else derived
    return f"RLPOST_HOME={home}\npython={python}\nrun_folder={run_folder}\n"


def _command(spec: JobSpec) -> str:
    agent = shlex.join(("--num-gpus", str(spec.num_gpus_per_node), *spec.agent_args))
    driver = "".join(f" {shlex.quote(word)}" for word in spec.driver_args)
    return f"""\
srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --mpi=none \\
  --output="${{attempt_dir//%/%%}}/agent-%N.log" \\
  "$python" -u -m bootstrap.agent --attempt-dir "$attempt_dir" {agent} -- \\
  "$python" -u -m rlpost.train{driver} --cluster-from-stdin --run-folder "$run_folder" "$@" &
"""


_PREAMBLE = """\
# Rendered by slurm/render.py, which says why each step is as it is.
set -u
umask 077
log() { echo "$(date '+%F %T') batch: $*"; }

stopped='' terminated=''
trap 'stopped=early' USR2
trap 'terminated=1; log "TERM: cancelled, or the grace time is over"' TERM

"""

_ATTEMPT = """\
export RLPOST_HOME PYTHONPATH="$RLPOST_HOME"
cd "$RLPOST_HOME" || exit 1

# Every start of the job gets a folder that no start has used.
mkdir -p "$run_folder/attempts" || exit 1
attempt=${SLURM_RESTART_COUNT:-0}
while [ -e "$run_folder/attempts/$attempt" ]; do attempt=$((attempt + 1)); done
attempt_dir=$run_folder/attempts/$attempt
mkdir "$attempt_dir" || exit 1
ln -sfn "$attempt" "$run_folder/attempts/latest"
od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' >"$attempt_dir/secret"
log "job $SLURM_JOB_ID attempt $attempt on $SLURM_JOB_NODELIST: $attempt_dir"

write_stop() {
  stopped=1
  log "USR2: preemption, or the time limit is near; asking the run to stop"
  [ -e "$attempt_dir/STOP" ] && return
  echo '{"reason": "signal USR2 to the batch script: preemption, or the time limit is near"}' >"$attempt_dir/.STOP"
  mv -n "$attempt_dir/.STOP" "$attempt_dir/STOP"
}
trap write_stop USR2
[ "$stopped" = early ] && write_stop

"""

_WAIT_AND_DECIDE = """\
srun_pid=$!
wait "$srun_pid"
code=$?
# A signal ends wait, not srun.
while kill -0 "$srun_pid" 2>/dev/null; do
  wait "$srun_pid"
  code=$?
done

verdict=$(cat "$attempt_dir/verdict" 2>/dev/null)
log "agents ended (srun exit $code), verdict: ${verdict:-none}"
case $verdict in
  done) exit 0 ;;
  config) log "not requeued: starting again cannot help, see $attempt_dir/verdict.json" && exit 78 ;;
  requeue) ;;
  *) log "not requeued: the attempt failed, see $attempt_dir" && exit "$((code > 0 ? code : 1))" ;;
esac
state=$(squeue -h -j "$SLURM_JOB_ID" -o %T)
[ "$state" != RUNNING ] && log "not requeued: Slurm calls the job ${state:-unknown}" && exit 75
[ "$terminated" ] && log "not requeued: the batch script got TERM" && exit 75
trap '' TERM # requeue sends it
log "requeue: the run was asked to stop and can go on from its checkpoint"
scontrol requeue "$SLURM_JOB_ID" || exit 75
"""
