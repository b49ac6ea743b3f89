"""A driver that is killed while it generates and trains, and a rank of the critic in between: real
Ray, Megatron, SGLang, router. The critic has its own layout on the policy's GPUs, and the two are
offloaded in turn; in another run, engines get adapters alone.

Each answer is requested from an engine, but its text is a function of the prompt, so that two runs
can be compared bit for bit (benchmarks/crash_answers.py).
"""

import hashlib
import os
import shutil
import time

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from benchmarks import crash_answers
from rlpost.metrics.writer import read_metrics
from tests.e2e.local_run import LocalRun
from tests.e2e.runs import ADAPTERS, process_of

NUM_STEPS = 8
SETTINGS = (
    *("--num-rollout", str(NUM_STEPS), "--save-interval", "4", "--eval-interval", "none"),
    *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--global-batch-size", "32"),
    *("--rm-type", "exact_match", "--rollout-health-check-interval", "1"),
)
OF_CRITIC = (
    *("--advantage-estimator", "ppo", "--critic-lr", "1e-3", "--lambd", "0.95"),
    *("--critic-tensor-model-parallel-size", "1", "--offload-train", "true"),
)


LOGS = {"critic": "critic-1.log", "engine": "engine-1-server.log"}
"""The log that a process to be killed writes, by its role."""


def start(folder, more):
    """Start a run whose answers are a function of the prompt."""
    folder.mkdir()
    plugin = shutil.copy(crash_answers.__file__, folder / "answers.py")
    own = ("--custom-generate-function-path", f"{plugin}:answer")
    own += ("--dynamic-sampling-filter-path", f"{plugin}:is_wanted")
    return LocalRun(folder, (*SETTINGS, *own, *more))


def finished_prompts(folder):
    """Return the prompt of each group that was finished, sorted."""
    lines = (folder / "answers.finished").read_text().splitlines()
    return sorted(int(line.split()[0]) for line in lines)


def digests_of_critic(run):
    """Return the SHA-256 of each tensor and object of the critic in the last checkpoint; none without
    a critic. Which of a rank's files holds a tensor may differ.
    """
    folder = run.folder / f"checkpoints/iter_{NUM_STEPS:07d}/critic"
    if not folder.exists():
        return {}
    dcp_to_torch_save(folder, whole := run.folder / "critic.pt")
    content = torch.load(whole, weights_only=False)
    whole.unlink()
    return {name: digest(value) for name, value in content.items()}


def digest(value):
    """Return the SHA-256 of the bytes of a tensor or of an object's pickle."""
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.contiguous().view(torch.uint8).numpy()).hexdigest()
    return hashlib.sha256(
        value.getvalue() if hasattr(value, "getvalue") else repr(value).encode()
    ).hexdigest()


@pytest.mark.parametrize(
    ("more", "killed_after"),
    [(OF_CRITIC, {2: "driver", 5: "critic", 6: "driver"}), (ADAPTERS, {2: "engine", 5: "driver"})],
    ids=["critic", "adapters"],
)
def test_killed_drivers_and_critics_leave_the_run_of_those_that_lived(
    assets, tmp_path, more, killed_after
):
    """Engines that live are the same processes to the end; weights of policy and critic, metrics and
    prompts are equal, and no finished group is generated again.

    ``killed_after`` maps steps to roles; a checkpoint comes every 4 steps, so that steps are
    trained again.
    """
    with start(tmp_path / "undisturbed", more) as undisturbed:
        undisturbed.done()
    kept = (
        r"engine-0-server\.log" if "engine" in killed_after.values() else r"engine-\d+-server\.log"
    )
    engines = []
    with start(tmp_path / "killed", more) as run:
        for number, (step, role) in enumerate(killed_after.items(), start=1):
            run.until(lambda: run.step >= step, f"step {step}")  # noqa: B023
            engines.append(run.processes(kept))
            if role == "driver":
                run.driver().kill()
            else:
                process_of(run.folder / "attempts/0" / LOGS[role]).kill()
            killed_at, reached = time.monotonic(), run.step
            run.until(lambda: run.step > reached, "a newly trained step")  # noqa: B023
            seconds = time.monotonic() - killed_at
            print(f"KILL {number} of the {role}: {seconds:.1f} s to a newly trained step")
        engines.append(run.processes(kept))
        run.done()
    assert engines[0] and all(each == engines[0] for each in engines)
    assert not run.processes(r".*\.log"), "detached workers end with the attempt"
    assert run.weights == undisturbed.weights
    of_critic = digests_of_critic(run)
    assert bool(of_critic) == (more is OF_CRITIC)
    differing = {
        name for name, it in digests_of_critic(undisturbed).items() if of_critic[name] != it
    }
    assert not differing
    assert run.lines == undisturbed.lines and len(run.lines) >= NUM_STEPS
    prompts = finished_prompts(tmp_path / "killed")
    assert len(set(prompts)) == len(prompts)
    assert prompts == finished_prompts(tmp_path / "undisturbed")
    events = [entry["event"] for entry in run.ledger]
    assert (events.count("started"), events.count("ready")) == (1, 1)
    recovered = [entry for entry in run.ledger if entry["event"] == "recovered"]
    print("recovered after", [entry["seconds"] for entry in recovered], "s; load", os.getloadavg())
    assert [entry["role"] for entry in recovered] == list(killed_after.values())
    drivers = [entry for entry in recovered if entry["role"] == "driver"]
    assert [entry["incarnation"] for entry in drivers] == list(range(1, len(drivers) + 1))
    for entry in recovered:
        if entry["role"] == "critic":
            assert entry["ranks"] == [1] and entry["steps_again"] > 0
    if more is ADAPTERS:
        log = (run.folder / "attempts/0/engine-1-server.log").read_text()
        assert f"Lora name=version-{NUM_STEPS}," in log, "the restarted engine is given adapters"
        lines = read_metrics(run.folder / "metrics.jsonl")
        sent = [line["sync/weights_bytes"] for line in lines if "sync/weights_bytes" in line]
        assert sent and max(sent) < 300_000
