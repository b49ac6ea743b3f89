"""A task of the sandbox servers: one server on a node of a CPU partition. Python 3.6.

Each server restarts independently, and belongs to a run: it ends (exit 0) when the run's driver
closes its lease or is gone. A preempted server exits with 75 and is requeued; the driver notices
the loss of its sandboxes at once and repeats their work elsewhere. After a failure it is requeued
``max_failures`` times at most. The server runs on the node itself, not in a container: it makes the
namespaces of its sandboxes.
"""

import signal
import subprocess
from pathlib import Path
from typing import List, Sequence

from common.files import discard, is_there
from slurm.batch.engine import restart_task
from slurm.batch.host import End, Host
from slurm.batch.options import Options, expand
from slurm.batch.place import Place
from slurm.batch.steps import KEEP_OTHER_TASKS, output_pattern


def run_sandbox_server(host: Host, options: Options, server: Sequence[str]) -> End:
    """Run one start of the server and decide what follows it.

    Raises:
        SpecError: a variable or a program is missing.
        OSError: the run folder cannot be written.
    """
    name = host.job.name
    place = host.find_place(options, server, options.run_folder)
    folder = Path(place.run_folder) / "sandboxes"
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    record = folder / "nodes" / f"{name}.json"
    discard(record)  # of an earlier start
    host.log_start()
    words = [expand(word, host.environ) for word in server]
    argv = server_step(options, place, name, words)
    step = host.start_step(argv, logs / f"{name}.launch")
    code = host.wait_for(step, lambda: _pass_on(step, record))
    host.log(f"the server ended (srun exit {code})")
    discard(record)
    return restart_task(host, options, code, logs / f"{name}.failures")


def server_step(options: Options, place: Place, name: str, server: Sequence[str]) -> List[str]:
    """The step of the server. Pure."""
    logs = f"{place.run_folder}/sandboxes/logs"
    return [
        *["srun", "--ntasks-per-node=1", "--mpi=none", *KEEP_OTHER_TASKS],
        f"--cpus-per-task={options.cores}",
        output_pattern(logs, f"{name}.log"),
        "--open-mode=append",
        *[place.python, "-u", "-m", "rlpost.agents.sandbox.server"],
        *["--run-folder", place.run_folder, "--name", name, *server],
    ]


def _pass_on(step: "subprocess.Popen[bytes]", record: Path) -> bool:
    """Send USR2 to srun, which passes it on to the server; whether the server can handle it.

    Before the server has written its record, the signal would kill it or srun, as a failure.
    """
    if not is_there(record):
        return False
    step.send_signal(signal.SIGUSR2)
    return True
