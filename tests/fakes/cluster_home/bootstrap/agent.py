"""An agent that starts nothing: it does what the driver's arguments tell it and leaves a verdict.
Stdlib only.

The first word of the driver that is not the batch script's own is the behaviour:

    done | config | failed      leave this verdict at once
    wait                        wait for STOP (which TERM and USR2 to the agent make too), then leave ``requeue``
    slow-save                   the same, and between them wait for the file ``saved``
    wait-once                   the same on attempt 0; ``done`` on later ones
    crash                       die without a verdict
    no-package                  die as an agent whose package is not installed
    requeue                     leave this verdict at once, as after a stop
    commit-requeue              the same with a checkpoint one step beyond the last attempt's
    requeue-once                requeue on attempt 0, done on later ones
    exclude-once                ``failed`` because of this host on attempt 0; ``done`` on later ones
    linger                      the head leaves ``done``, the other tasks stay

Beside the verdict: ``argv-HOST.json`` (what it was called with) and ``signals-HOST`` (a line a
signal).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

DEADLINE_S = 120.0


def write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


def wait_for(file: Path) -> None:
    end = time.monotonic() + DEADLINE_S
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.05)


def main() -> int:
    own, driver = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
    attempt_dir = Path(own[own.index("--attempt-dir") + 1])
    host = socket.gethostname()
    fixed = driver.index("--cluster-from-stdin")  # then: --run-folder PATH
    arguments = driver[driver.index("rlpost.train") + 1 : fixed] + driver[fixed + 3 :]
    behaviour = arguments[0]

    def on_signal(number: int, _: object) -> None:
        with (attempt_dir / f"signals-{host}").open("a") as file:
            file.write(signal.Signals(number).name + "\n")
        if not (attempt_dir / "STOP").exists():
            write(
                attempt_dir / "STOP",
                json.dumps({"reason": f"signal {number} to the agent on {host}"}),
            )

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGUSR2, on_signal)
    if behaviour == "no-package":
        import package_that_is_missing  # type: ignore[import-not-found]  # noqa: F401
    names = ("PYTHONPATH", "RLPOST_HOME", "SLURM_JOB_ID", "SLURM_NODEID", "MARK", "IMAGE", "SET_UP")
    place = {
        key: os.environ.get(key) for key in (*names, "CUDA_VISIBLE_DEVICES", "SLURM_CPUS_PER_TASK")
    }
    facts = {"agent": own, "driver": driver, "cwd": os.getcwd(), "environment": place}
    write(attempt_dir / f"argv-{host}.json", json.dumps(facts))
    if behaviour == "crash":
        os._exit(3)
    verdict = behaviour
    if behaviour in ("wait", "wait-once", "slow-save"):
        verdict = "requeue"
        if behaviour == "wait-once" and attempt_dir.name != "0":
            verdict = "done"
        else:
            wait_for(attempt_dir / "STOP")
        if behaviour == "slow-save":
            wait_for(attempt_dir / "saved")
    is_first = attempt_dir.name == "0"
    if behaviour == "commit-requeue":
        with (attempt_dir.parents[1] / "ledger.jsonl").open("a") as ledger:
            ledger.write(json.dumps({"event": "committed", "step": int(attempt_dir.name)}) + "\n")
        verdict = "requeue"
    if behaviour in ("requeue-once", "exclude-once"):
        verdict = behaviour.replace("exclude", "failed").split("-")[0] if is_first else "done"
    if behaviour == "exclude-once" and is_first:
        write(attempt_dir / "exclude", host + "\n")
    if behaviour == "linger":
        verdict = "done"
        if os.environ["SLURM_NODEID"] != "0":
            time.sleep(DEADLINE_S)
    if os.environ.get("SLURM_NODEID", "0") == "0":
        write(attempt_dir / "verdict.json", json.dumps({"verdict": verdict, "cause": "told to"}))
        write(attempt_dir / "verdict", verdict + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
