"""Slurm commands for one job: submit, cancel, requeue, query. For many jobs at once see ``queue``.

Input: job ids (``job_id``), scripts. Output: values, or a SlurmError with Slurm's message. Needs no
accounting database.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm.errors import JobError, SubmitError
from slurm.job_id import cluster_option, is_job_id, number_of, on_cluster
from slurm.states import JobInfo, JobState, parse_job
from slurm.variables import submission_environment

logger = logging.getLogger(__name__)

COMMAND_TIMEOUT_S = 60.0
POLL_S = 15.0  # limits the load on the controller


def is_available() -> bool:
    """Whether this host can submit jobs: sbatch is on PATH and has a cluster configuration.

    A host may have Slurm's commands without a cluster; each command then reports a missing
    configuration. A controller that is down still counts as a cluster.
    """
    if shutil.which("sbatch") is None:
        return False
    try:
        return "configuration source" not in run_slurm("scontrol", "ping").stderr
    except (OSError, subprocess.TimeoutExpired):
        return True


def job_info(job_id: str) -> JobInfo:
    """Query the controller; state UNKNOWN if the job is purged or no answer comes."""
    try:
        done = run_slurm(
            "scontrol", *_options(job_id), "--oneliner", "show", "job", number_of(job_id)
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("scontrol show job %s: %s", job_id, error)
        return JobInfo(job_id, JobState.UNKNOWN)
    if done.returncode != 0:
        logger.debug("scontrol show job %s: %s", job_id, done.stderr.strip())
        return JobInfo(job_id, JobState.UNKNOWN)
    return parse_job(done.stdout)


def cancel(job_id: str) -> None:
    """Cancel a job; the batch script does not requeue it.

    Raises:
        JobError: Slurm rejects the command (with its message) or does not answer.
    """
    done = _run_checked("scancel", *_options(job_id), number_of(job_id))
    if done.returncode != 0:
        raise JobError(f"scancel {job_id}: {done.stderr.strip()}")


def ask_to_requeue(job_id: str) -> None:
    """Make a running job save and requeue: send its batch script USR2, as before a time limit.

    Raises:
        JobError: Slurm rejects the command (with its message) or does not answer.
    """
    done = _run_checked("scancel", *_options(job_id), "--batch", "--signal=USR2", number_of(job_id))
    # scancel exits with 0 after "Job/step already completing or completed".
    if done.returncode != 0 or "error" in done.stderr:
        raise JobError(f"job {job_id} cannot be asked to save and continue: {done.stderr.strip()}")


def expected_start(script: Path, environ: Mapping[str, str]) -> str:
    """Slurm's estimate of when and where this script would start (``sbatch --test-only``).

    Args:
        environ: environment of sbatch, which sends it to the controller as for a submission.

    Raises:
        SubmitError: sbatch would reject the script (with its message and the remedy).
        JobError: sbatch is missing on this host or does not answer.
    """
    done = _run_checked("sbatch", "--test-only", str(script), environ=environ)
    if done.returncode != 0:
        raise SubmitError(f"sbatch would not take the job: {explain_with_sinfo(done.stderr)}")
    return done.stderr.strip().removeprefix("sbatch: ")


def explain_with_sinfo(words: str, cluster: str = "") -> str:
    """sbatch's message and the probable remedy, with what sinfo says is allowed if it answers."""
    try:
        sinfo = run_slurm(*SINFO, *cluster_option(on_cluster("", cluster))).stdout
    except (OSError, subprocess.TimeoutExpired):
        sinfo = ""
    return explain_rejection(words, sinfo)


def _options(job_id: str) -> list[str]:
    """Options that lead to the cluster of a job. Raises JobError for any other word."""
    if not is_job_id(job_id):
        raise JobError(f"{job_id!r} is not a Slurm job id")
    return cluster_option(job_id)


def _run_checked(
    *argv: str, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command. Raises JobError if it is missing or does not answer."""
    try:
        return run_slurm(*argv, environ=environ)
    except FileNotFoundError:
        raise JobError(
            f"there is no {argv[0]} on this host; call this where Slurm's commands are"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobError(
            f"{argv[0]} does not answer ({error}); does scontrol ping say that the controller is up?"
        ) from None


def run_slurm(
    *argv: str, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands. Raises OSError or TimeoutExpired.

    ``environ``: by default this process's, without variables that the command reads as options.
    """
    return subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        env=submission_environment(os.environ) if environ is None else environ,
    )


SINFO = ("sinfo", "--noheader", "--format=%P|%a|%l|%D|%G|%f")
"""Partition (``*``: the default), availability, time limit, nodes, gres, features; man sinfo."""
_NOTHING = ("(null)", "N/A", "")
_ASSOCIATIONS = "sacctmgr show associations user=$USER format=account,partition,qos"


@dataclass(frozen=True, slots=True)
class NodesOfPartition:
    """Nodes of one kind in a partition, one line of ``SINFO``."""

    partition: str
    availability: str
    time_limit: str
    num_nodes: str
    gres: str
    features: str


def parse_sinfo(text: str) -> list[NodesOfPartition]:
    """Parse what ``SINFO`` printed; lines of another form are left out.

    >>> parse_sinfo("gpu*|up|1-00:00:00|4|gpu:8|h100\\n")[0].time_limit
    '1-00:00:00'
    """
    rows = [line.strip().split("|") for line in text.splitlines()]
    return [NodesOfPartition(*row) for row in rows if len(row) == 6]


def explain_rejection(words: str, sinfo: str) -> str:
    """sbatch's message, each line once, and the probable remedy if there is one. Pure.

    The messages are those of ``slurm_strerror`` (src/common/slurm_errno.c) and of sbatch itself,
    Slurm 21.08 to 25.11.
    Args:
        words: standard error of sbatch.
        sinfo: output of ``SINFO``; empty if it gave none.
    """
    lines = dict.fromkeys(line.rstrip() for line in words.strip().splitlines())
    remedy = _remedy(words, parse_sinfo(sinfo))
    return "\n".join([*lines, *([f"remedy: {remedy}"] if remedy else [])])


_REASON = re.compile(r"(?:submission failed|allocation failure): (.*)")
"""Slurm's own reason; other lines may be sentences of a site's plugin."""


def _remedy(words: str, nodes: Sequence[NodesOfPartition]) -> str:
    words = "\n".join(_REASON.findall(words)) or words
    for pattern, change, facts in _REMEDIES:
        if re.search(pattern, words, re.IGNORECASE):
            known = facts(nodes)
            return f"{change}; sinfo: {known}" if known else change
    return ""


def _partitions(nodes: Sequence[NodesOfPartition]) -> str:
    """``gpu (default), cpu (down)``."""
    shown = {}
    for one in nodes:
        name = one.partition.removesuffix("*")
        remarks = ["default"] if one.partition.endswith("*") else []
        remarks += [one.availability] if one.availability != "up" else []
        shown[name] = f"{name} ({', '.join(remarks)})" if remarks else name
    return ", ".join(shown.values())


def _time_limits(nodes: Sequence[NodesOfPartition]) -> str:
    return _per_partition(nodes, lambda one: one.time_limit)


def _node_counts(nodes: Sequence[NodesOfPartition]) -> str:
    return _per_partition(nodes, _nodes)


def _features(nodes: Sequence[NodesOfPartition]) -> str:
    return _per_partition(nodes, lambda one: _or_none(one.features))


def _sizes(nodes: Sequence[NodesOfPartition]) -> str:
    return _per_partition(nodes, lambda one: f"{_nodes(one)} with {_or_none(one.gres)}")


def _nothing(nodes: Sequence[NodesOfPartition]) -> str:
    return ""


def _per_partition(
    nodes: Sequence[NodesOfPartition], fact: Callable[[NodesOfPartition], str]
) -> str:
    """``gpu: 4 nodes with gpu:8 or 2 nodes with gpu:4, cpu: 9 nodes with none``."""
    facts: dict[str, dict[str, None]] = {}
    for one in nodes:
        facts.setdefault(one.partition.removesuffix("*"), {})[fact(one)] = None
    return ", ".join(f"{name}: {' or '.join(values)}" for name, values in facts.items())


def _nodes(one: NodesOfPartition) -> str:
    return f"{one.num_nodes} node" if one.num_nodes == "1" else f"{one.num_nodes} nodes"


def _or_none(text: str) -> str:
    return "none" if text in _NOTHING else text


_REMEDIES: tuple[tuple[str, str, Callable[[Sequence[NodesOfPartition]], str]], ...] = (
    # The first pattern that is found decides: an account's message also mentions partitions.
    (
        r"violates accounting/QOS policy|AssocMax|AssocGrp|QOSMax|QOSGrp",
        f"the account or its QOS limits this job; see its limits: {_ASSOCIATIONS},maxjobs,maxtres, "
        "and choose --account, --qos, --time and --nodes within them",
        _time_limits,
    ),
    (r"account", f"choose --account, and --partition, from: {_ASSOCIATIONS}", _partitions),
    (r"invalid qos", f"choose --qos from: {_ASSOCIATIONS}", _nothing),
    (
        r"not permitted to use this partition|partition.*(inactive|down)|partition.*in drain",
        "choose another --partition",
        _partitions,
    ),
    (r"invalid partition|no partition specified", "choose --partition", _partitions),
    (
        r"time limit|partition configuration not available",
        "choose --time and --nodes within the limits of the partition",
        lambda nodes: _per_partition(
            nodes, lambda one: f"{_nodes(one)} for at most {one.time_limit}"
        ),
    ),
    (
        r"generic resource|\bgres\b|node configuration is not available|TRES",
        "choose --num-gpus-per-node, --gpu-type, --nodes and --partition that exist, or how GPUs are requested "
        "(--gpu-request gres, gpus-per-node or none)",
        _sizes,
    ),
    (
        r"node count specification|more processors requested|too many nodes",
        "choose --nodes",
        _node_counts,
    ),
    (r"invalid feature", "choose --constraint", _features),
    (
        r"dependency problem",
        "the job in --sbatch=--dependency=... is not known to Slurm any more (MinJobAge after its end): leave the "
        "option out",
        _nothing,
    ),
    (r"reservation", "choose --reservation from: scontrol show reservation", _nothing),
    (
        r"unable to contact slurm controller|socket timed out",
        "submit again when scontrol ping says that the controller is up",
        _nothing,
    ),
)
