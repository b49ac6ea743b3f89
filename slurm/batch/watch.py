"""Restart a job whose batch host is lost. Runs in a step on other nodes. Python 3.6.

Slurm neither requeues nor ends a job with --no-kill when its batch host goes DOWN: it takes the
node out of the job, and the job stays RUNNING without a batch script to its time limit (seen with
Slurm 22.05). Then BatchHost is not among the job's nodes any more. Slurm would start the job again
with one node less than it asked for, so the number is set again.
"""

import os
import time
from typing import Mapping

from common.host_lists import HostListError, expand
from slurm.batch.signals import ignore_term
from slurm.batch.slurm_job import SlurmJob
from slurm.job_id import run_command

POLL_S = 30.0
ANSWER_S = 20.0


def watch(policy: str, num_nodes: int, environ: Mapping[str, str] = os.environ) -> None:
    """Wait until the batch host is lost; then requeue the job, or cancel it where that is refused.

    Args:
        policy: requeue or cancel.
        num_nodes: nodes that the job asked for.
    """
    job, poll_s = SlurmJob(environ), float(environ.get("RLPOST_WATCH_S", "") or POLL_S)
    squeue = ["squeue", "-h", "-j", job.name, "-t", "RUNNING"]
    while True:  # until Slurm accepts; the requeue ends this step
        time.sleep(poll_s)
        answer = run_command([*squeue, "-o", "%B %N"], environ, timeout_s=ANSWER_S) or ""
        if not has_lost_its_host(answer):
            continue
        ignore_term()  # the requeue sends it
        print(f"the batch host {answer.split()[0]} is lost: {policy}", flush=True)
        if policy == "requeue":
            refusal = job.requeue()
            if refusal is None:
                job.update(f"NumNodes={num_nodes}")
                return
            print(f"not requeued: {refusal.words}", flush=True)
            if not refusal.is_final:
                continue
        # otherwise it would hold its nodes to its time limit
        if run_command(["scancel", job.name], environ) is not None:
            return


def has_lost_its_host(answer: str) -> bool:
    """Whether squeue's ``BATCHHOST NODELIST`` shows a job without its batch host. Pure.

    In doubt it does not.
    """
    words = answer.split()
    if len(words) != 2:
        return False
    try:
        hosts = expand(words[1])
    except HostListError:
        return False
    return bool(hosts) and words[0] not in hosts
