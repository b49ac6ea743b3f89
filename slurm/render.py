"""A job spec as the text of a batch script. Pure.

Comes in: a ``JobSpec``. Goes out: bash (4.3 or later) for ``sbatch``, at most 80 lines, that ``shellcheck`` passes.

The script starts one agent a node under one ``srun``, turns Slurm's signals into the STOP file and does what
``supervise`` makes of the one word that the agents leave (``bootstrap/handoff.py``); where the batch host has no
Python, only a preempted run starts again. What the script knows that the agents cannot:

- USR2 (time limit near, or preemption where the site sends the job's signal) reaches the batch shell alone.
- The end of the job, which a preemption moves, stands in squeue's answer; a container may have no squeue. Where it
  does not answer at USR2 there is no more time than the lead of that signal, for all that is known.
- TERM to the batch shell means that somebody cancelled the job, or that the end of the grace time has come and Slurm
  requeues by itself. A cancelled job must not come back, so after TERM the script never requeues.
- srun takes variables for options: what a job asked for from whose shell this one was submitted, and where a site or
  user says ``--export=NONE`` to sbatch, that the agents get nothing of what is set here. So does squeue.
- What srun says of the tasks (``launch.log``) is all that is known of a node whose agent never began; a variable would
  let it name the first of several nodes only.
- srun turns TERM into KILL for all its tasks (slurm, src/srun/signals.c): the script never signals it.
- srun lingers after the death of a node until Slurm has noticed (SlurmdTimeout, minutes): the verdict counts as end.
- The controller may be restarting when the agents end: it is asked for some minutes. What is not known is not requeued.
- The verdict may come ten seconds before the end of the job, and a job that has reached its time limit cannot be
  requeued: neither srun nor a container is waited for longer than the end allows.
- Slurm 22.05 does not requeue a preempted job that ended by itself within its grace time: the script must.
- The hosts that a job does without can be changed only while it waits: after the requeue, which has sent TERM by then.
- Where requeueing is forbidden a new job goes on with the same folder. It depends on the end of this one by its name
  (singleton), which ``executor.completed`` makes the run's own.

A spec without ``home``, ``python`` and ``run_folder`` gives a script that finds them itself, for plain
``sbatch jobs/NAME.sbatch`` from the project's folder; RLPOST_HOME, RLPOST_PYTHON and RLPOST_RUN_FOLDER override.
Outside a job such a script checks and submits itself (``login.py``), and it refuses flags that come too late.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from slurm.container import Container, container_removal, enroot_command, pyxis_options
from slurm.spec import JobSpec
from slurm.supervise import EXIT_PREEMPTED


def render_sbatch(spec: JobSpec) -> str:
    """The batch script for this job."""
    before = (directives(spec), _RENDERED, submits_itself(spec), _PREAMBLE, places(spec), _ATTEMPT)
    parts = (*before, image(spec), _record(spec), _stop(spec))
    return "".join((*parts, _command(spec), _wait(spec), _decide(spec), _AGAIN, _restart(spec)))


def preparation(spec: JobSpec, home: str) -> str:
    """Text before the agent's command: set the variables, run the setup commands. ``home`` is text for the shell."""
    variables = (f"{name}={value}" for name, value in spec.environment)
    text = shlex.join(("env", *variables)) + " " if spec.environment else ""
    if spec.setup_commands:
        text += f"bash {home}/slurm/prepare.sh {shlex.join(spec.setup_commands)} -- "
    return text


def directives(spec: JobSpec, *, is_warned: bool = True) -> str:
    """The options of sbatch; ``is_warned``: whether the batch shell gets USR2 before the end."""
    nodes = [f"--nodes={spec.nodes + spec.spare_nodes}", "--ntasks-per-node=1"]
    nodes += ["--exclusive", "--mem=0"] if spec.exclusive else []
    if spec.gpu_request == "gres":
        nodes.append(f"--gres=gpu:{spec.num_gpus_per_node}")
    elif spec.gpu_request == "gpus-per-node":
        nodes.append(f"--gpus-per-node={spec.num_gpus_per_node}")
    named = ("partition", "account", "qos", "reservation", "constraint")
    place = [_option(name, value) for name in named if (value := getattr(spec, name)) is not None]
    place += [_option("exclude", ",".join(spec.exclude))] if spec.exclude else []
    again = ["--requeue"] if spec.requeue == "requeue" else ["--no-requeue"]
    again += ["--dependency=singleton"] if spec.requeue == "chain" else []
    warning = [f"--signal=B:USR2@{spec.signal_lead_s}"] if is_warned else []
    time = [f"--time={spec.time}", *warning, *again, "--open-mode=append"]
    output = [_option("output", spec.output or "slurm-%j.out")]
    lines: Sequence[Sequence[str]] = ([f"--job-name={spec.job_name}"], nodes, place, time, output)
    return "#!/bin/bash\n" + "".join(f"#SBATCH {' '.join(line)}\n" for line in lines if line)


def _option(name: str, value: str) -> str:
    return f"--{name}={shlex.quote(value)}"


def submits_itself(spec: JobSpec) -> str:
    """A line that checks and submits the script where it is called outside a job; only for one that may be."""
    if spec.home is not None:
        return ""
    container = spec.container
    words = [f"--container={container.backend if container else 'none'}"]
    if container is not None:
        image = container.image
        words.append(f'--image="{_assigned(image)}"' if image.startswith("$") else shlex.quote(f"--image={image}"))
        words += [f"--needs={name}" for name in container.variables]
    words += [f"--reads={shell_word(path)}" for path in spec.reads]
    recipe = () if spec.reads else spec.driver_args
    driver = "".join(f" {shlex.quote(word)}" for word in recipe)
    return f"""\
[ "${{SLURM_JOB_ID:-}}" ] || exec python3 "${{RLPOST_HOME:-$(dirname "$0")/..}}/slurm/login.py" \
{" ".join(words)} "$0" --{driver} -- "$@"
"""


def places(spec: JobSpec, *, is_supervised: bool = True) -> str:
    """Lines that set RLPOST_HOME, python and run_folder, and end the job where there is no such thing.

    They also refuse flags that come too late and a container that is not available; ``auto`` sets RLPOST_CONTAINER,
    and where the job is supervised host_python.
    """
    home = shlex.quote(spec.home) if spec.home else "${RLPOST_HOME:-$SLURM_SUBMIT_DIR}"
    found = "${RLPOST_PYTHON:-python3}" if spec.container else "${RLPOST_PYTHON:-$RLPOST_HOME/.venv/bin/python}"
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
    """Lines that end the job where its container, or without one the interpreter, is not there."""
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
    """What stands behind ``image=``."""
    return f"${{{image[1:]}:-}}" if image.startswith("$") else shlex.quote(image)


def image(spec: JobSpec, log: str = "$attempt_dir/launch.log") -> str:
    """Lines that set image, or end the job with the names of what is not set; ``log`` for what an import says."""
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
    """A line that imports what image names, unless that is a file or nothing."""
    cache = shlex.quote(container.cache) if container.cache else '"${RLPOST_IMAGE_CACHE:-$RLPOST_HOME/runs/images}"'
    return "[[ $image == /* || ! $image ]] || " + _get_image(f'"$image" --cache {cache}', log)


def _get_image(words: str, log: str) -> str:
    """A command that sets image to the file of an image in the cache; ``words`` for ``slurm.image``, as shell text.

    What the import says goes to both logs; where it fails, a step that fails at once stands for srun.
    """
    get = f'python3 -m slurm.image {words} 2>&1 >&3 | tee "{log}" >&2'
    get = f'image=$({{ {get}; exit "${{PIPESTATUS[0]}}"; }} 3>&1)'
    return get + ' || { log "no image; see above"; srun() { return 1; }; }\n'


def _needed(variables: Sequence[str]) -> str:
    """The rest of an assignment, and a line that ends the job with the names of all variables that are not set."""
    if not variables:
        return ""
    return f"""\
 missing=$(for name in {" ".join(variables)}; do [ "${{!name:-}}" ] || echo -n " $name"; done)
[ "$missing" ] && log "not set:$missing; export before sbatch, or fill jobs/clusters/site.toml and make jobs" && exit 78
"""


def shell_word(text: str) -> str:
    """A word for the shell; a path that begins with a variable ``$NAME`` is left to it."""
    return f'"{text}"' if re.fullmatch(r"\$[A-Z][A-Z0-9_]*[A-Za-z0-9/._@%+=-]*", text) else shlex.quote(text)


def _record(spec: JobSpec) -> str:
    image = ' --image "$image"' if spec.container else ""
    unless = f'{{ [ $? = {EXIT_PREEMPTED} ] && exit {EXIT_PREEMPTED}; log "no budgets on this host"; }}'
    return f"""\
supervise() {{ {_host_python(spec)} -m slurm.supervise "$@" --run-folder "$run_folder" --attempt "$attempt"; }}
supervise start --job "$SLURM_JOB_ID" --nodes "$SLURM_JOB_NODELIST"{image} || {unless}
"""


def _stop(spec: JobSpec) -> str:
    return f"""\
write_stop() {{
  stopped=1 now=$(date +%s)
  log "USR2: preemption, or the time limit is near; asking the run to stop"
  printf '{{"reason": "signal USR2 to the batch script: preemption, or the time limit is near", "time": %s, %s}}\\n' \\
    "$now" "\\"deadline\\": \\"$(job_end || echo $((now + {spec.signal_lead_s})))\\"" >"$attempt_dir/.STOP"
  mv -n "$attempt_dir/.STOP" "$attempt_dir/STOP"
}}
trap write_stop USR2; [ "$stopped" = early ] && write_stop
"""


def inside(spec: JobSpec) -> str:
    """Lines of the srun command that bring it into the container, each with a backslash at its end."""
    if spec.container is None:
        return ""
    if spec.container.backend == "auto":
        return '  ${inside[@]+"${inside[@]}"} \\\n'  # bash 4.3 calls an empty array unset
    return pyxis_options(spec.container) if spec.container.backend == "pyxis" else enroot_command(spec.container)


def chosen_words(spec: JobSpec, folder: str) -> str:
    """With ``auto``, lines that set inside to the words of the container that was chosen, and note it in a folder."""
    if not _is_auto(spec):
        return ""
    assert spec.container is not None
    pyxis, enroot = (
        text.replace(" \\\n", "\n").strip() for text in (pyxis_options(spec.container), enroot_command(spec.container))
    )
    return f"""\
inside=(); echo "$RLPOST_CONTAINER" >"{folder}/container"
[ "$RLPOST_CONTAINER" = pyxis ] && inside=({pyxis})
[ "$RLPOST_CONTAINER" = enroot ] && inside=({enroot})
"""


def removal(spec: JobSpec, seconds: str = "60") -> str:
    """A line that removes what the container leaves on the nodes, if there is one; ``seconds``: at most, as text."""
    if spec.container is None:
        return ""
    if _is_auto(spec):
        return '[ "$RLPOST_CONTAINER" = none ] || ' + container_removal('"$RLPOST_CONTAINER"', seconds)
    return container_removal(spec.container.backend, seconds)


def _is_auto(spec: JobSpec) -> bool:
    return spec.container is not None and spec.container.backend == "auto"


def _command(spec: JobSpec) -> str:
    spares = ("--spare-nodes", str(spec.spare_nodes)) if spec.spare_nodes else ()
    agent = " ".join(map(shell_word, ("--num-gpus", str(spec.num_gpus_per_node), *spares, *spec.agent_args)))
    driver = "".join(f" {shlex.quote(word)}" for word in spec.driver_args)
    ready = preparation(spec, '"$RLPOST_HOME"')
    return f"""\
{chosen_words(spec, "$attempt_dir")}\
SLURM_SRUN_REDUCE_TASK_EXIT_MSG=0 srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --mpi=none \\
  --output="${{attempt_dir//%/%%}}/agent-%N.log" 2>>"$attempt_dir/launch.log" \\
{inside(spec)}  {ready}"$python" -u -m bootstrap.agent --attempt-dir "$attempt_dir" {agent} -- \\
  "$python" -u -m rlpost.train{driver} --cluster-from-stdin --run-folder "$run_folder" "$@" &
"""


def _wait(spec: JobSpec) -> str:
    return f"""\
srun_pid=$! code=0 end=''
# A signal ends wait, not srun; and srun may stay long after the verdict.
while kill -0 "$srun_pid" 2>/dev/null && [ "$SECONDS" -lt "${{end:-$((SECONDS + 1))}}" ]; do
  [ -e "$attempt_dir/verdict" ] && end=${{end:-$((SECONDS + $(patience {spec.teardown_s})))}}
  sleep 1 & wait -n "$srun_pid" "$!"
done
kill -0 "$srun_pid" 2>/dev/null || {{ wait "$srun_pid" || code=$?; }}
"""


def _decide(spec: JobSpec) -> str:
    words = ["--max-preemptions", str(spec.max_preemptions), "--max-failures", str(spec.max_failures)]
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
log "chain: job $job goes on"; supervise chained --job "${{job%;*}}"; exit 0
"""
    return """\
scontrol requeue "$SLURM_JOB_ID" || exit 75
for _ in {1..10}; do [ -z "$exclude" ] || \
scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$exclude" && break; sleep 0.5; done
"""


_RENDERED = """\
# Rendered by slurm/render.py, which says why each step is as it is.
"""
_PREAMBLE = """\
set -u; umask 077; unset "${!SLURM_GPU@}" "${!SLURM_MEM@}" SLURM_{CPUS,NTASKS}_PER_GPU SLURM_EXPORT_ENV "${!SQUEUE_@}"
log() { echo "$(date '+%F %T') batch: $*"; }
job_end() { SLURM_TIME_FORMAT=%s timeout 10 squeue -h -j "$SLURM_JOB_ID" -o %e; } # a preemption moves it
patience() { # seconds for what may hang: $1, unless the job ends before
  local left=$1 end; end=$(job_end)
  [ "$end" -gt 0 ] 2>/dev/null && left=$((end - $(date +%s) - 5))
  echo $((left < 1 ? 1 : left < $1 ? left : $1))
}
stopped='' terminated=''; trap 'stopped=early' USR2
trap 'terminated=1; log "TERM: cancelled, or the grace time is over"' TERM
"""

_ATTEMPT = """\
SLURM_JOB_END_TIME=$(job_end); export SLURM_JOB_END_TIME RLPOST_HOME PYTHONPATH="$RLPOST_HOME"
# Every start of the job gets a folder that no start has used.
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
[ "$state" != RUNNING ] && log "not requeued: Slurm calls the job ${state:-unknown}" && exit 75
[ "$terminated" ] && log "not requeued: the batch script got TERM" && exit 75
log "requeue: job $SLURM_JOB_ID starts again"; trap '' TERM # requeue sends it
"""
