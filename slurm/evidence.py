"""Derive a missing verdict of an attempt from the attempt's files, and write it.

Input: ``launch.log`` and ``agent-HOST.log`` of the attempt; secrets, checkpoints and journal of the
run.
Output: a ``causes.Finding``; the files ``exclude``, ``verdict.json`` and ``verdict``. Reading never
fails: a file that is missing or unreadable is ignored. Only the standard library of Python 3.6 and
later, see ``supervise``.
"""

import json
import sys
from pathlib import Path
from typing import List, Mapping, Sequence

from common.attempt import EXCLUDE_FILE, LAUNCH_LOG, SECRET_FILE, VERDICT_FILE, VERDICT_JSON
from common.files import tail_or_empty, text_or_empty, write_atomic
from common.host_lists import HostListError, expand, failed_tasks
from slurm.causes import Finding, HostEnd, explain, is_disk_full, last_words, without_secrets
from slurm.enroot import FREED_FILE

TAIL_BYTES = 1 << 16


def find_cause(run_folder: Path, attempt_dir: Path, nodelist: str, code: int = 0) -> Finding:
    """Find out why the agents of an attempt wrote no verdict.

    ``nodelist`` is Slurm's compact list of its hosts, ``code`` the exit code of srun or, if there
    was no image, of ``slurm.image``. The verdict is ``none`` if agents had started, or if there is
    no evidence. Secrets of the run are masked.
    """
    launch = tail_or_empty(attempt_dir / LAUNCH_LOG, TAIL_BYTES)
    try:
        hosts: Sequence[str] = expand(nodelist)
    except HostListError:
        hosts = ()
    ends = failed_tasks(launch, hosts)
    if not hosts:  # the ledger lacks the start of this attempt: use the hosts that left files
        logs = {path.stem[len("agent-") :] for path in attempt_dir.glob("agent-*.log")}
        hosts = sorted(logs | set(ends))
    left = {}
    for host in hosts:
        log = tail_or_empty(attempt_dir / f"agent-{host}.log", TAIL_BYTES)
        left[host] = HostEnd(ends.get(host, ""), log)
    finding = explain(left, launch, code) if left else None
    if finding is None:
        said = last_words(launch)
        finding = Finding("none", f"the agents left no verdict; srun said:\n{said}" if said else "")
    return finding._replace(cause=mask(run_folder, attempt_dir, finding.cause))


def leave_verdict(attempt_dir: Path, finding: Finding) -> None:
    """Write the verdict files in place of the agents; ``verdict`` comes last."""
    if finding.verdict == "none":
        return
    content = {"verdict": finding.verdict, "cause": finding.cause, "exclude": list(finding.exclude)}
    try:
        if finding.exclude:
            write_atomic(
                attempt_dir / EXCLUDE_FILE, "".join(f"{host}\n" for host in finding.exclude)
            )
        write_atomic(attempt_dir / VERDICT_JSON, json.dumps(content, indent=1) + "\n")
        write_atomic(attempt_dir / VERDICT_FILE, finding.verdict + "\n")
    except OSError as error:  # a full disk: the ledger and the log still record the verdict
        print(f"{attempt_dir}: the verdict cannot be written: {error}", file=sys.stderr)


def keep_freed_hosts(attempt_dir: Path) -> List[str]:
    """Do not exclude hosts whose disk was full of what the removal step has freed since.

    Returns those hosts; ``slurm.enroot`` leaves a file for each host where it freed something.
    """
    path = attempt_dir / EXCLUDE_FILE
    excluded = text_or_empty(path).split()
    launch = tail_or_empty(attempt_dir / LAUNCH_LOG, TAIL_BYTES)
    freed = []
    for host in excluded:
        log = tail_or_empty(attempt_dir / f"agent-{host}.log", TAIL_BYTES)
        host_lines = [
            line for line in launch.splitlines() if line.startswith(f"slurmstepd-{host}:")
        ]
        is_freed = (attempt_dir / f"{FREED_FILE}-{host}").exists()
        if is_freed and is_disk_full("\n".join([log, *host_lines])):
            freed.append(host)
    if freed:
        kept = [host for host in excluded if host not in freed]
        write_atomic(path, "".join(f"{host}\n" for host in kept))
    return freed


def mask(run_folder: Path, attempt_dir: Path, text: str) -> str:
    """Mask this run's secrets, and anything that looks like a secret, in a text."""
    lines = text_or_empty(run_folder / "secrets.env").splitlines()
    values = [line.partition("=")[2].strip().strip("'\"") for line in lines]
    return without_secrets(text, [*values, text_or_empty(attempt_dir / SECRET_FILE)])


def resume_point(run_folder: Path, entries: Sequence[Mapping[str, object]]) -> str:
    """A sentence for the log: where the next attempt resumes."""
    newest = next((entry for entry in reversed(entries) if entry.get("event") == "committed"), None)
    journal = any(
        path.is_file() and path.stat().st_size
        for path in _save_folder(run_folder).glob("journal/*")
    )
    if newest is not None:
        beyond = " and the journal" if journal else ""
        return (
            f"it resumes from checkpoint {newest.get('checkpoint') or newest.get('step')}{beyond}"
        )
    if journal:  # which may contain no record
        return "no checkpoint yet: it starts from the beginning, with what the journal holds"
    return "nothing is saved yet: it starts from the beginning"


def _save_folder(run_folder: Path) -> Path:
    try:
        save = json.loads((run_folder / "run.json").read_text())["checkpoint"]["save"]
    except (OSError, ValueError, KeyError, TypeError):
        save = None
    return Path(save) if isinstance(save, str) and save else run_folder / "checkpoints"
