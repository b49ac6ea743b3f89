"""Run every check that needs a GPU, and print one table: ``python -m tools.gpu_check``.

Each check runs in a separate process with a time limit; logs, and the table as results.json, go
into a folder. The exit code is 0 if no check failed, 1 if one did, and 2 if no check can run on
this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from tools.gpu_check.checks import CHECKS, Check, rows_of_tests
from tools.gpu_check.machine import Machine, examine
from tools.gpu_check.table import Row, render

ROOT = Path(__file__).parents[2]
REMEDY = "on a machine with a GPU: make install, then make test-gpu; --on-cpu tries the checks without one"
TAIL_LINES = 3
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected checks."""
    options = parser().parse_args(arguments)
    chosen = [check for check in CHECKS if not options.only or check.name in options.only]
    if options.list:
        print("\n".join(f"{check.name:<25} {check.shows}" for check in chosen))
        return 0
    machine = examine()
    if not options.on_cpu and (obstacles := machine.obstacles()):
        print(f"gpu_check: {'; '.join([*obstacles, *machine.lacks()])}; {REMEDY}", file=sys.stderr)
        return 2
    folder = options.out or ROOT / "runs" / f"gpu-check-{datetime.now():%Y%m%d-%H%M%S}"
    folder.mkdir(parents=True, exist_ok=True)
    memory_gb = None if options.on_cpu else min(gpu.memory_gb for gpu in machine.gpus)
    print("\n".join([*machine.lines(), f"logs: {folder}", ""]), flush=True)
    # so that a running check is killed as well
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows: list[Row] = []
    try:
        for check in chosen:
            found = run(
                check, folder, memory_gb=memory_gb, limit_s=options.timeout_s or check.timeout_s
            )
            rows += found
            print(
                "\n".join(f"{row.outcome:<8}{row.check}  {row.note}"[:150] for row in found),
                flush=True,
            )
            write(folder / "results.json", machine, rows)
    except KeyboardInterrupt:
        print("\ngpu_check: interrupted; the checks that ended before:", file=sys.stderr)
        print(report(machine, rows))
        return INTERRUPTED
    print("\n" + report(machine, rows))
    return int(any(row.outcome == "failed" for row in rows))


def parser() -> argparse.ArgumentParser:
    """Command-line parser."""
    made = argparse.ArgumentParser(
        prog="python -m tools.gpu_check", description=__doc__.splitlines()[0]
    )
    names = [check.name for check in CHECKS]
    made.add_argument(
        "--only", nargs="+", choices=names, metavar="CHECK", help=f"some of: {', '.join(names)}"
    )
    made.add_argument(
        "--list", action="store_true", help="print what each check shows, and run none"
    )
    made.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder of logs and results.json (default: in runs/)",
    )
    made.add_argument(
        "--timeout-s",
        type=int,
        metavar="S",
        help="time limit of each check, instead of its default",
    )
    made.add_argument(
        "--on-cpu",
        action="store_true",
        help="run the checks on the CPU, to test all but the device",
    )
    return made


def run(check: Check, folder: Path, *, memory_gb: float | None, limit_s: int) -> list[Row]:
    """Run one check with its output in a log; return its rows. Kills all its processes at the
    end.
    """
    name = "".join(letter if letter.isalnum() else "-" for letter in check.name)
    log, results = folder / f"{name}.log", folder / f"{name}.xml"
    results.unlink(missing_ok=True)
    command = check.command(sys.executable, str(results), memory_gb=memory_gb)
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    if memory_gb is None:
        environ["RLPOST_GPU_TESTS_ON"] = "cpu"
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_group(process)
    seconds = time.monotonic() - started
    if code is None:
        return [Row(check.name, "failed", seconds, f"no end after {limit_s} s; see {log}")]
    return rows_of(check, code, seconds, log, results)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def rows_of(check: Check, code: int, seconds: float, log: Path, results: Path) -> list[Row]:
    """Rows of a check that has ended."""
    failed = Row(
        check.name, "failed", seconds, f"{exit_reason(code)}: {last_lines(log)}; see {log}"
    )
    if check.figures is not None:
        return [failed] if code != 0 else [row_of_figures(check, seconds, log)]
    if not results.exists():
        return [failed]
    rows = rows_of_tests(check.name, results.read_text())
    explains_exit = code == 0 or any(row.outcome == "failed" for row in rows)
    return rows if rows and explains_exit else [*rows, failed]


def row_of_figures(check: Check, seconds: float, log: Path) -> Row:
    """Row of a benchmark that has ended without an error."""
    assert check.figures is not None
    try:
        return Row(check.name, "passed", seconds, check.figures(log.read_text(errors="replace")))
    except (ValueError, LookupError) as error:
        reason = f"its output has no figures ({error}); see {log}"
        return Row(check.name, "failed", seconds, reason)


def exit_reason(code: int) -> str:
    """Describe the exit code of a process."""
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def last_lines(log: Path) -> str:
    """The last lines of a log, joined to one line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-TAIL_LINES:])


def report(machine: Machine, rows: Sequence[Row]) -> str:
    """The machine's facts and the table of results."""
    return "\n".join([*machine.lines(), "", render(rows)])


def write(path: Path, machine: Machine, rows: Sequence[Row]) -> None:
    """Write the report as JSON."""
    document = {
        "machine": dataclasses.asdict(machine),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
