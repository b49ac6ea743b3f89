"""Jobs of one step: a conversion of weights, a check of an image. Python 3.6.

Such a job does not handle preemption: after a requeue it starts from scratch.
"""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Sequence

from common.exit_codes import EXIT_DONE, EXIT_FAILED
from slurm.batch.host import End, Host
from slurm.batch.options import Options, expand
from slurm.batch.place import Place, find_run_folder
from slurm.batch.steps import ONE_TASK_PER_NODE, in_container, output_pattern, prepared

LAST_LINES = 5
FIRST_PORT, NUM_PORTS = 20000, 10000


def convert(host: Host, options: Options, tool: Sequence[str], flags: Sequence[str]) -> End:
    """Convert weights into ``options.save``; ``tool`` are words of ``rlpost convert``.

    One torchrun runs per node, with one process per GPU. If the target exists, the job ends at
    once. It writes to a folder with its job id in the name, which it renames at the end, and removes
    only that folder: another conversion may be writing.

    Raises:
        SpecError: a variable or a program is missing.
        OSError: the run folder cannot be written.
    """
    place = _place(host, options, tool)
    save = expand(options.save, host.environ)
    if os.path.exists(save):
        host.log(f"{save} is there; remove it to convert again")
        return End(EXIT_DONE)
    job_id = host.environ["SLURM_JOB_ID"]
    writing = f"{save}.converting-{job_id}"
    shutil.rmtree(writing, ignore_errors=True)  # of this job before it was requeued
    address = host.environ.get("MASTER_ADDR") or _first_host(host)
    port = host.environ.get("MASTER_PORT") or str(free_pair(2 * int(job_id)))
    words = [expand(word, host.environ) for word in tool]
    torchrun = ["bash", f"{place.home}/slurm/torchrun.sh", place.python, str(options.gpus)]
    command = [*torchrun, address, port, "-m", "rlpost", "convert", *words]
    code = _run(host, options, place, [*command, "--save", writing, *flags])
    if code == EXIT_DONE and os.path.isdir(writing):
        os.rename(writing, save)
        host.log(f"{save} is written")
        return End(EXIT_DONE)
    shutil.rmtree(writing, ignore_errors=True)
    host.log(f"not converted (exit {code}); the end of {place.run_folder}/*.log:")
    _print_logs(place.run_folder)
    return _end(host, EXIT_FAILED)


def run_doctor(host: Host, options: Options, doctor: Sequence[str]) -> End:
    """Run ``bootstrap.image.doctor`` where the job's agents would run.

    The output is the file ``findings`` in the run folder. Raises as ``convert``.
    """
    place = _place(host, options, doctor)
    words = [expand(word, host.environ) for word in doctor]
    command = [place.python, "-m", "bootstrap.image.doctor", *words]
    output = f"{place.run_folder}/findings"
    return _end(host, _run(host, options, place, [*command, "--output", output]))


def _end(host: Host, code: int) -> End:
    """After TERM Slurm itself may have preempted the job, and requeues it."""
    return End(code, is_final=code == EXIT_DONE or not host.signals.terminated)


def _place(host: Host, options: Options, words: Sequence[str]) -> Place:
    place = host.find_place(options, words, find_run_folder(options, host.environ))
    os.makedirs(place.run_folder, exist_ok=True)
    return place


def _run(host: Host, options: Options, place: Place, command: Sequence[str]) -> int:
    """Run a command on every node, in its container; return srun's exit code."""
    code, place = host.import_image(options, place, Path(place.run_folder) / "launch.log")
    if code:
        return code
    (Path(place.run_folder) / "container").write_text(place.container + "\n")
    srun = ["srun", *ONE_TASK_PER_NODE, "--kill-on-bad-exit=1"]
    output = output_pattern(place.run_folder, "%N.log")
    before = prepared(options.environment, options.setup_command, place.home)
    argv = [*srun, output, *in_container(place), *before, *command]
    host.prepare_nodes(place)
    step = subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=host.environ)
    code = host.wait_for(step, lambda: True)
    host.remove_container(place)
    return code


def free_pair(start: int) -> int:
    """The first of two neighbouring ports on which nothing listens here.

    They are torchrun's and the store's; other jobs may run on this node. ``start``: where to begin
    in the range, another for each job.
    """
    for offset in range(0, NUM_PORTS, 2):
        port = FIRST_PORT + (start + offset) % NUM_PORTS
        if _is_free(port) and _is_free(port + 1):
            return port
    return FIRST_PORT + start % NUM_PORTS


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # Connections in TIME_WAIT, of an earlier start, do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _first_host(host: Host) -> str:
    nodes = host.environ.get("SLURM_JOB_NODELIST", "")
    shown = subprocess.check_output(
        ["scontrol", "show", "hostnames", nodes], universal_newlines=True, env=host.environ
    )
    return shown.split()[0]


def _print_logs(run_folder: str) -> None:
    for path in sorted(Path(run_folder).glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-LAST_LINES:]
        print(f"==> {path} <==", *lines, sep="\n", file=sys.stdout, flush=True)
