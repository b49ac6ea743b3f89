"""Sandbox servers as jobs of a real Slurm: a node dies, and its episode is retried on another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlpost.extensions.agents.sandbox.jobs import SERVER
from rlpost.extensions.agents.sandbox.registry import Registry
from slurm.arrays import SandboxSpec
from slurm.render import render_sandbox
from tests.cluster.jobs import sbatch, until
from tests.cluster.lab import Lab
from tests.contract.test_sandbox import WHY_NOT
from tests.settings import a_job

PROJECT = Path(__file__).parents[2]
DRIVER = """
import asyncio, json, sys
from pathlib import Path
from rlpost.extensions.agents.sandbox.protocol import Limits, SandboxLost, retry
from rlpost.extensions.agents.sandbox.remote import RemotePool
from rlpost.extensions.agents.sandbox.verify import CaseVerifier, verify

LIMITS = Limits(memory_mib=128, disk_mib=16, processes=20, wall_seconds=60)

async def main():
    names, lost = [], []

    async def episode(sandbox):
        names.append(sandbox.name)
        await sandbox.write("/work/answer.sh", b"read a; echo $((a + 1))")
        try:
            if len(names) == 1:
                print(sandbox.name, flush=True)
                await sandbox.run("sleep 60")
        except SandboxLost as error:
            lost.append(str(error))
            raise
        return await verify(sandbox, CaseVerifier("sh answer.sh", [(b"1\\n", b"2")]), pool)

    async with RemotePool(Path(sys.argv[1]), LIMITS, wait_seconds=60) as pool:
        verdict = await retry(pool, episode)
    print(json.dumps({"names": names, "lost": lost, "score": verdict.score}), flush=True)

asyncio.run(main())
"""


@pytest.mark.every_slurm
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_an_episode_on_a_killed_node_is_retried_on_the_other_and_servers_end_with_the_run(
    lab: Lab,
) -> None:
    run = lab.shared / "sandbox-run"
    Registry(run).create()
    job = a_job(
        job_name="sandboxes",
        gpu_request="none",
        exclusive=False,
        time="5",
        signal_lead_s=1,
        home=str(PROJECT),
        python=sys.executable,
        run_folder=str(run),
        output=str(run / "%A_%a.batch"),
    )
    script = render_sandbox(SandboxSpec(job, 2, places=2, module=SERVER))
    # --exclusive puts each server on a separate node
    array = sbatch(lab, "sandboxes.sbatch", script, "--exclusive")
    until(lambda: len(Registry(run).nodes()) == 2, lab, "two servers have registered")
    driver = lab.popen(
        "ctl",
        [sys.executable, "-c", DRIVER, str(run)],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with driver:
        assert driver.stdout is not None
        node = driver.stdout.readline().split("/")[0]
        lab.kill_node(node)
        outcome = json.loads(driver.stdout.readline())
    lab.start_node(node)
    assert outcome["score"] == 1.0 and len(outcome["lost"]) == 1, outcome
    first, second = (name.split("/")[0] for name in outcome["names"])
    assert first == node != second

    def ended() -> bool:
        listed = lab.run("ctl", ["squeue", "-h", "-j", array], check=False).stdout.splitlines()
        return not [line for line in listed if second in line]

    until(ended, lab, "the server of the other node has ended with the lease")
    lab.run("ctl", ["scancel", array], check=False)
    lab.wait_idle([node])
    left = lab.run(second, ["ps", "-eo", "args"]).stdout
    assert "sandbox.server" not in left and "sandbox.inner" not in left
