"""Render a job spec as the text of a batch script. Pure.

Input: a ``JobSpec``. Output: a script for ``sbatch``: bash 4.3 or later, at most 80 lines,
``shellcheck``-clean.

The script starts one agent per node under one ``srun``, turns Slurm's signals into the STOP file,
and passes the agents' verdict (``common/attempt.py``) to ``supervise``, which decides whether to
requeue. On a batch host without Python, only a preempted run is requeued. Constraints that only the
batch script can handle:

- Only the batch shell receives USR2 (time limit near, or preemption where the site sends the job's
  signal).
- A preemption moves the end of the job. squeue reports it, but a container may have no squeue. If
  squeue does not answer at USR2, the script assumes that the signal's lead is all the time left.
- TERM to the batch shell means that the job was cancelled, or that its grace time is over and Slurm
  requeues it. A cancelled job must not be requeued, so after TERM the script never requeues.
- srun and squeue read options from the environment. The submitting shell may itself run in a job
  and export that job's options, and ``sbatch --export=NONE`` would hide this script's variables
  from the agents: unset both.
- srun's messages about the tasks (``launch.log``) are the only record of a node whose agent never
  started. With SLURM_SRUN_REDUCE_TASK_EXIT_MSG set, srun would report only the first of several
  nodes.
- srun turns TERM into KILL for all its tasks (slurm, src/srun/signals.c): the script never signals
  srun.
- After a node failure srun waits until Slurm detects it (SlurmdTimeout, minutes): the verdict ends
  the step.
- The controller may be restarting when the agents end: retry squeue, and do not requeue if the
  state stays unknown.
- The verdict may be written ten seconds before the end of the job, and a job at its time limit
  cannot be requeued: waiting for srun and for container cleanup is bounded by the end of the job.
- Slurm 22.05 does not requeue a preempted job that exits within its grace time: the script must.
- With spare nodes a lost node must not end the job: ``--no-kill`` for job and step, without which
  Slurm kills the whole step and requeues the job when it sets the node DOWN. Slurm then removes the
  node from the job: a requeued job would ask for one node less, so that is set again. If that node
  is the batch host, no script is left to requeue: ``watch_batch_host.sh`` does it.
- The list of excluded hosts can be changed only while the job is pending: after the requeue, which
  sends TERM.
- Where requeueing is forbidden, a new job resumes the run in the same folder. It waits for this one
  through its name (``--dependency=singleton``), which ``executor.completed`` makes unique to the
  run.

A spec without ``home``, ``python`` and ``run_folder`` renders a script that finds them at run time,
for plain ``sbatch jobs/NAME.sbatch`` from the project folder; RLPOST_HOME, RLPOST_PYTHON and
RLPOST_RUN_FOLDER override. Outside a job such a script checks and submits itself (``login.py``). It
rejects sbatch options given too late.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from common.attempt import STOP_FILE
from common.exit_codes import EXIT_PREEMPTED
from slurm.container import Container, container_removal, enroot_command, pyxis_options
from slurm.spec import JobSpec


def render_sbatch(spec: JobSpec) -> str:
    """Render the batch script of this job."""
    before = (directives(spec), _RENDERED, submits_itself(spec), _PREAMBLE, places(spec), _ATTEMPT)
    parts = (*before, image(spec), _record(spec), _stop(spec))
    started = (_watch(spec), _command(spec), _wait(spec))
    return "".join((*parts, *started, _decide(spec), _AGAIN, _restart(spec)))


def preparation(spec: JobSpec, home: str) -> str:
    """Prefix of the agent's command: set variables, run setup commands. ``home`` is shell text."""
    variables = (f"{name}={value}" for name, value in spec.environment)
    text = shlex.join(("env", *variables)) + " " if spec.environment else ""
    if spec.setup_commands:
        text += f"bash {home}/slurm/prepare.sh {shlex.join(spec.setup_commands)} -- "
    return text


def directives(
    spec: JobSpec, *, is_warned: bool = True, first: Sequence[Sequence[str]] = ()
) -> str:
    """Render the ``#SBATCH`` lines, with the options of ``first`` before those of the spec.

    ``is_warned``: the batch shell gets USR2 before the time limit.
    """
    nodes = [f"--nodes={spec.nodes + spec.spare_nodes}", "--ntasks-per-node=1"]
    nodes += ["--no-kill"] if spec.spare_nodes else []
    nodes += ["--exclusive", "--mem=0"] if spec.exclusive else []
    if spec.gpu_request == "gres":
        nodes.append(f"--gres=gpu:{spec.num_gpus_per_node}")
    elif spec.gpu_request == "gpus-per-node":
        nodes.append(f"--gpus-per-node={spec.num_gpus_per_node}")
    named = ("partition", "account", "qos", "reservation", "constraint")
    place = [_option(name, value) for name in named if (value := getattr(spec, name)) is not None]
    place += [f"--segment={spec.segment}"] if spec.segment else []
    place += [_option("exclude", ",".join(spec.exclude))] if spec.exclude else []
    again = ["--requeue"] if spec.requeue == "requeue" else ["--no-requeue"]
    again += ["--dependency=singleton"] if spec.requeue == "chain" else []
    warning = [f"--signal=B:USR2@{spec.signal_lead_s}"] if is_warned else []
    time = [f"--time={spec.time}", *warning, *again, "--open-mode=append"]
    output = [_option("output", spec.output or "slurm-%j.out")]
    lines = (*first, [f"--job-name={spec.job_name}"], nodes, place, time, output)
    return "#!/bin/bash\n" + "".join(f"#SBATCH {' '.join(line)}\n" for line in lines if line)


def _option(name: str, value: str) -> str:
    return f"--{name}={shlex.quote(value)}"


def submits_itself(spec: JobSpec) -> str:
    """Line that checks and submits the script outside a job; empty for a fixed home."""
    if spec.home is not None:
        return ""
    container = spec.container
    words = [f"--container={container.backend if container else 'none'}"]
    if container is not None:
        image = container.image
        words.append(
            f'--image="{_assigned(image)}"'
            if image.startswith("$")
            else shlex.quote(f"--image={image}")
        )
        words += [f"--needs={name}" for name in container.variables]
    words += [f"--reads={shell_word(path)}" for path in spec.reads]
    recipe = () if spec.reads else spec.driver_args
    driver = "".join(f" {shlex.quote(word)}" for word in recipe)
    return f"""\
[ "${{SLURM_JOB_ID:-}}" ] || exec python3 "${{RLPOST_HOME:-$(dirname "$0")/..}}/slurm/login.py" \
{" ".join(words)} "$0" --{driver} -- "$@"
"""


def places(spec: JobSpec, *, is_supervised: bool = True) -> str:
    """Lines that set RLPOST_HOME, python and run_folder, or exit with 78.

    They also reject sbatch options given too late and a container that is not available. ``auto``
    sets RLPOST_CONTAINER and, for a supervised job, host_python.
    """
    home = shlex.quote(spec.home) if spec.home else "${RLPOST_HOME:-$SLURM_SUBMIT_DIR}"
    found = "${RLPOST_PYTHON:-$RLPOST_HOME/.venv/bin/python}"
    if spec.container:
        found = "${RLPOST_PYTHON:-python3}"
    python = shlex.quote(spec.python) if spec.python else found
    derived = f"${{RLPOST_RUN_FOLDER:-$RLPOST_HOME/runs/{spec.job_name}-$SLURM_JOB_ID}}"
    run_folder = shlex.quote(spec.run_folder) if spec.run_folder else derived
    return f"""\
RLPOST_HOME={home}
{"" if _is_auto(spec) else f"python={python}" + chr(10)}\
run_folder={run_folder}
cd "$RLPOST_HOME/bootstrap/.." || {{ log "no rlpost in $RLPOST_HOME; sbatch there or export RLPOST_HOME"; exit 78; }}
{"" if spec.home else _LATE_FLAGS}{_choice(spec, is_supervised)}"""


_LATE_FLAGS = """\
bash slurm/cluster_flags.sh "$@" || exit 78
"""
_PYTHON = """\
command -v "$python" >/dev/null || { log "no $python; make install there, or export RLPOST_PYTHON"; exit 78; }
"""


def _choice(spec: JobSpec, is_supervised: bool) -> str:
    """Lines that exit with 78 if the container or interpreter is not available."""
    container = spec.container
    if container is None:
        return _PYTHON
    if container.backend != "auto":
        image = f' "{_assigned(container.image)}"' if container.image.startswith("$") else ""
        return f"bash slurm/container.sh {container.backend}{image} >/dev/null || exit 78\n"
    words = ("bash slurm/container.sh auto", '"$image"', *container.variables)
    in_image = shlex.quote(spec.python) if spec.python else "${RLPOST_PYTHON:-python3}"
    on_host = spec.python or spec.host_python
    python = shlex.quote(on_host) if on_host else "${RLPOST_PYTHON:-$RLPOST_HOME/.venv/bin/python}"
    return f"""\
image={_assigned(container.image)} python={in_image}{" host_python=python3" if is_supervised else ""}
RLPOST_CONTAINER=$({" ".join(words)}) || exit 78; export RLPOST_CONTAINER # pyxis, enroot, none
[ "$RLPOST_CONTAINER" = none ] && image='' python={python}{" host_python=$python" if is_supervised else ""}
[ "$RLPOST_CONTAINER" != none ] || {_PYTHON}\
"""


def _host_python(spec: JobSpec) -> str:
    if spec.container is None:
        return '"$python"'
    return '"$host_python"' if spec.container.backend == "auto" else "python3"


def _assigned(image: str) -> str:
    """Right-hand side of ``image=``."""
    return f"${{{image[1:]}:-}}" if image.startswith("$") else shlex.quote(image)


def image(spec: JobSpec, log: str = "$attempt_dir/launch.log") -> str:
    """Lines that set image, or exit and list the unset variables.

    ``log`` receives the output of the import.
    """
    container = spec.container
    if container is None:
        return ""
    if container.backend == "auto":
        return _imported(container, log)
    if not container.is_imported:
        is_variable = container.image.startswith("$")
        assignment = f"image={_assigned(container.image)}" + (_needed(container.variables) or "\n")
        return assignment + (_imported(container, log) if is_variable else "")
    assert container.cache is not None
    needed = _needed(container.variables)
    get = _get_image(shlex.join((container.image, "--cache", container.cache)), log)
    return (f"image=''{needed}" if needed else "") + get


def _imported(container: Container, log: str) -> str:
    """Line that imports the image unless ``$image`` is a file path or empty."""
    cache = '"${RLPOST_IMAGE_CACHE:-$RLPOST_HOME/runs/images}"'
    if container.cache:
        cache = shlex.quote(container.cache)
    return "[[ $image == /* || ! $image ]] || " + _get_image(f'"$image" --cache {cache}', log)


def _get_image(words: str, log: str) -> str:
    """Command that sets image to its file; ``words``: arguments of ``slurm.image``.

    The import's output goes to both logs. If the import fails, ``srun`` is replaced by a function
    that fails at once, so that the failure takes the same path as a failed step.
    """
    get = f'python3 -m slurm.image {words} 2>&1 >&3 | tee "{log}" >&2'
    get = f'image=$({{ {get}; exit "${{PIPESTATUS[0]}}"; }} 3>&1)'
    return get + ' || { log "no image; see above"; srun() { return 1; }; }\n'


def _needed(variables: Sequence[str]) -> str:
    """Rest of an assignment, and a line that exits and lists all variables that are not set."""
    if not variables:
        return ""
    return f"""\
 missing=$(for name in {" ".join(variables)}; do [ "${{!name:-}}" ] || echo -n " $name"; done)
[ "$missing" ] && log "not set:$missing; export before sbatch, or fill jobs/clusters/site.toml and make jobs" && exit 78
"""


def shell_word(text: str) -> str:
    """Quote a word for the shell; a leading variable ``$NAME`` of a path is still expanded."""
    if re.fullmatch(r"\$[A-Z][A-Z0-9_]*[A-Za-z0-9/._@%+=-]*", text):
        return f'"{text}"'
    return shlex.quote(text)


def _record(spec: JobSpec) -> str:
    image = ' --image "$image"' if spec.container else ""
    unless = (
        f'{{ [ $? = {EXIT_PREEMPTED} ] && exit {EXIT_PREEMPTED}; log "no budgets on this host"; }}'
    )
    return f"""\
supervise() {{ {_host_python(spec)} -m slurm.supervise "$@" --run-folder "$run_folder" --attempt "$attempt"; }}
supervise start --job "$SLURM_JOB_ID" --nodes "$SLURM_JOB_NODELIST"{image} || {unless}
"""


def _stop(spec: JobSpec) -> str:
    temporary, stop_file = f'"$attempt_dir/.{STOP_FILE}"', f'"$attempt_dir/{STOP_FILE}"'
    return stop_writer(
        spec, "asking the run to stop", temporary=temporary, put=f"mv -n {temporary} {stop_file}"
    )


def stop_writer(spec: JobSpec, effect: str, *, temporary: str, put: str) -> str:
    """Define ``write_stop``, called by USR2: write ``temporary`` and move it with ``put``."""
    return f"""\
write_stop() {{
  stopped=1 now=$(date +%s)
  log "USR2: preemption, or the time limit is near; {effect}"
  printf '{{"reason": "signal USR2 to the batch script: preemption, or the time limit is near", "time": %s, %s}}\\n' \\
    "$now" "\\"deadline\\": \\"$(job_end || echo $((now + {spec.signal_lead_s})))\\"" >{temporary}
  {put}
}}
trap write_stop USR2; [ "$stopped" = early ] && write_stop
"""


def inside(spec: JobSpec) -> str:
    """Lines of the srun command that enter the container, each ending in a backslash."""
    if spec.container is None:
        return ""
    if spec.container.backend == "auto":
        return '  ${inside[@]+"${inside[@]}"} \\\n'  # bash 4.3 calls an empty array unset
    if spec.container.backend == "pyxis":
        return pyxis_options(spec.container)
    return enroot_command(spec.container)


def chosen_words(spec: JobSpec, folder: str) -> str:
    """With ``auto``: set inside to the container's arguments; record it in ``folder``."""
    if not _is_auto(spec):
        return ""
    assert spec.container is not None
    pyxis, enroot = (
        text.replace(" \\\n", "\n").strip()
        for text in (pyxis_options(spec.container), enroot_command(spec.container))
    )
    return f"""\
inside=(); echo "$RLPOST_CONTAINER" >"{folder}/container"
[ "$RLPOST_CONTAINER" = pyxis ] && inside=({pyxis})
[ "$RLPOST_CONTAINER" = enroot ] && inside=({enroot})
"""


def removal(spec: JobSpec, seconds: str = "60") -> str:
    """Line that removes the container's files; ``seconds``: timeout, as shell text."""
    if spec.container is None:
        return ""
    if _is_auto(spec):
        return '[ "$RLPOST_CONTAINER" = none ] || ' + container_removal(
            '"$RLPOST_CONTAINER"', seconds
        )
    return container_removal(spec.container.backend, seconds)


def _is_auto(spec: JobSpec) -> bool:
    return spec.container is not None and spec.container.backend == "auto"


def _command(spec: JobSpec) -> str:
    spares: tuple[str, ...] = ()
    if spec.spare_nodes:
        spares = ("--num-nodes", str(spec.nodes), "--spare-nodes", str(spec.spare_nodes))
    tasks = "--ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0"
    tasks = f"--no-kill {tasks}" if spec.spare_nodes else tasks
    agent = " ".join(
        map(shell_word, ("--num-gpus", str(spec.num_gpus_per_node), *spares, *spec.agent_args))
    )
    driver = "".join(f" {shlex.quote(word)}" for word in spec.driver_args)
    ready = preparation(spec, '"$RLPOST_HOME"')
    return f"""\
{chosen_words(spec, "$attempt_dir")}\
SLURM_SRUN_REDUCE_TASK_EXIT_MSG=0 srun {tasks} --cpu-bind=none --mpi=none \\
  --output="${{attempt_dir//%/%%}}/agent-%N.log" 2>>"$attempt_dir/launch.log" \\
{inside(spec)}  {ready}"$python" -u -m bootstrap.agent --attempt-dir "$attempt_dir" {agent} -- \\
  "$python" -u -m rlpost.train{driver} --cluster-from-stdin --run-folder "$run_folder" "$@" &
"""


def _watch(spec: JobSpec) -> str:
    """Line that restarts the job if the batch host is lost; with ``--no-kill`` only.

    It outlasts as many nodes as there are spares.
    """
    if not spec.spare_nodes:
        return ""
    num_nodes = spec.nodes + spec.spare_nodes
    watching = min(spec.spare_nodes + 1, num_nodes - 1)
    policy = "requeue" if spec.requeue == "requeue" else "cancel"
    place = f"--relative=1 --nodes={watching} --ntasks-per-node=1 --cpu-bind=none --mpi=none"
    return f"""\
srun --no-kill --overlap {place} --output="${{attempt_dir//%/%%}}/watch-%N.log" \\
  bash "$RLPOST_HOME/slurm/watch_batch_host.sh" {policy} {num_nodes} 2>"$attempt_dir/watch.log" &
"""


def _wait(spec: JobSpec) -> str:
    return f"""\
srun_pid=$! code=0 end=''
# A signal interrupts wait, not srun; srun may linger long after the verdict.
while kill -0 "$srun_pid" 2>/dev/null && [ "$SECONDS" -lt "${{end:-$((SECONDS + 1))}}" ]; do
  [ -e "$attempt_dir/verdict" ] && end=${{end:-$((SECONDS + $(patience {spec.teardown_s})))}}
  sleep 1 & wait -n "$srun_pid" "$!"
done
kill -0 "$srun_pid" 2>/dev/null || {{ wait "$srun_pid" || code=$?; }}
"""


def _decide(spec: JobSpec) -> str:
    words = ["--max-preemptions", str(spec.max_preemptions)]
    words += ["--max-failures", str(spec.max_failures)]
    words += ["--max-stalled-attempts", str(spec.max_stalled_attempts)]
    words += ["--exclude", ",".join(spec.exclude)] if spec.exclude else []
    words += ["--never"] if spec.requeue == "never" else []
    preempted = "75" if spec.requeue == "never" else "again"
    return f"""\
verdict=$(cat "$attempt_dir/verdict" 2>/dev/null)
log "agents ended (srun exit $code), verdict: ${{verdict:-none}}"
{removal(spec, '"$(patience 60)"')}\
read -r answer exclude < <(supervise end --code "$code" ${{terminated:+--terminated}} \\
  {shlex.join(words)})
[ "$answer" ] || case $verdict in # no Python on this host
  done) answer=0 ;;
  config) answer=78 ;;
  requeue) answer={preempted} ;;
  *) answer=$((code > 0 ? code : 1)) ;;
esac
"""


def _restart(spec: JobSpec) -> str:
    if spec.requeue == "chain":
        script = '"$run_folder/job.sbatch"' if spec.run_folder else '"$0"'
        options = '${exclude:+"--exclude=$exclude"}'
        return f"""\
job=$(RLPOST_RUN_FOLDER=$run_folder sbatch --parsable {options} {script} "$@") || exit 75
log "chain: job $job resumes the run"; supervise chained --job "${{job%;*}}"; exit 0
"""
    if spec.spare_nodes:
        num_nodes = spec.nodes + spec.spare_nodes
        return f"""\
scontrol requeue "$SLURM_JOB_ID" || exit 75
for _ in {{1..10}}; do scontrol update JobId="$SLURM_JOB_ID" NumNodes={num_nodes} \
${{exclude:+"ExcNodeList=$exclude"}} && break; sleep 0.5; done
"""
    return """\
scontrol requeue "$SLURM_JOB_ID" || exit 75
for _ in {1..10}; do [ -z "$exclude" ] || \
scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$exclude" && break; sleep 0.5; done
"""


_RENDERED = """\
# Rendered by slurm/render.py; its docstring gives the reason for each step.
"""
_PREAMBLE = """\
set -u; umask 077; unset "${!SLURM_GPU@}" "${!SLURM_MEM@}" SLURM_{CPUS,NTASKS}_PER_GPU SLURM_EXPORT_ENV "${!SQUEUE_@}"
log() { echo "$(date '+%F %T') batch: $*"; }
job_end() { SLURM_TIME_FORMAT=%s timeout 10 squeue -h -j "$SLURM_JOB_ID" -o %e; } # a preemption moves it
patience() { # timeout in seconds: $1, or less if the job ends sooner
  local left=$1 end; end=$(job_end)
  [ "$end" -gt 0 ] 2>/dev/null && left=$((end - $(date +%s) - 5))
  echo $((left < 1 ? 1 : left < $1 ? left : $1))
}
stopped='' terminated=''; trap 'stopped=early' USR2
trap 'terminated=1; log "TERM: cancelled, or grace time over"' TERM
"""

_ATTEMPT = """\
SLURM_JOB_END_TIME=$(job_end); export SLURM_JOB_END_TIME RLPOST_HOME PYTHONPATH="$RLPOST_HOME"
# Each start of the job gets an unused attempt folder.
mkdir -p "$run_folder/attempts" || exit 1
attempt=${SLURM_RESTART_COUNT:-0}
while [ -e "$run_folder/attempts/$attempt" ]; do attempt=$((attempt + 1)); done
attempt_dir=$run_folder/attempts/$attempt; mkdir "$attempt_dir" || exit 1
ln -sfn "$attempt" "$run_folder/attempts/latest"
od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' >"$attempt_dir/secret"
log "job $SLURM_JOB_ID attempt $attempt on $SLURM_JOB_NODELIST: $attempt_dir"
"""

_AGAIN = """\
[ "$answer" = again ] || exit "$answer"
for _ in {1..30}; do state=$(timeout 10 squeue -h -j "$SLURM_JOB_ID" -o %T) && break; sleep 2; done
[ "$state" != RUNNING ] && log "not requeued: job state is ${state:-unknown}" && exit 75
[ "$terminated" ] && log "not requeued: the batch script got TERM" && exit 75
log "requeue: job $SLURM_JOB_ID"; trap '' TERM # requeue sends it
"""
