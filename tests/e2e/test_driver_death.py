"""Kills of the driver, an engine and a rank of the trainer while a run with a critic generates and
trains: real Ray, Megatron, SGLang.

Each answer is requested from an engine, but its text is a function of the prompt, so that two runs
can be compared bit for bit (tests/e2e/crash_answers.py).
"""

import hashlib
import os
import shutil
import time

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.e2e import crash_answers
from tests.e2e.local_run import LocalRun
from tests.e2e.runs import process_of

NUM_STEPS = 6
SETTINGS = (
    *("--num-rollout", str(NUM_STEPS), "--save-interval", "3", "--eval-interval", "none"),
    *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--global-batch-size", "32"),
    *("--rm-type", "exact_match", "--rollout-health-check-interval", "1"),
    *("--advantage-estimator", "ppo", "--critic-lr", "1e-3", "--lambd", "0.95"),
)
KILLED_AFTER = {2: "driver", 3: "engine", 5: "trainer"}
"""Roles by the step after which one of their processes is killed. A checkpoint comes every 3 steps,
so that steps are trained again.
"""
LOGS = {"trainer": "actor-1.log", "engine": "engine-1-server.log"}
"""The log that a process to be killed writes, by its role."""


def start(folder):
    """Start a run whose answers are a function of the prompt."""
    folder.mkdir()
    plugin = shutil.copy(crash_answers.__file__, folder / "answers.py")
    own = ("--custom-generate-function-path", f"{plugin}:answer")
    own += ("--dynamic-sampling-filter-path", f"{plugin}:is_wanted")
    return LocalRun(folder, (*SETTINGS, *own))


def finished_prompts(folder):
    """Return the prompt of each group that was finished, sorted."""
    lines = (folder / "answers.finished").read_text().splitlines()
    return sorted(int(line.split()[0]) for line in lines)


def digests_of_critic(run):
    """Return the SHA-256 of each tensor and object of the critic in the last checkpoint, by name.

    Which of a rank's files holds a tensor may differ.
    """
    folder = run.folder / f"checkpoints/iter_{NUM_STEPS:07d}/critic"
    dcp_to_torch_save(folder, whole := run.folder / "critic.pt")
    content = torch.load(whole, weights_only=False)
    whole.unlink()
    return {name: digest(value) for name, value in content.items()}


def digest(value):
    """Return the SHA-256 of the bytes of a tensor or of an object's pickle."""
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.contiguous().view(torch.uint8).numpy()).hexdigest()
    content = value.getvalue() if hasattr(value, "getvalue") else repr(value).encode()
    return hashlib.sha256(content).hexdigest()


def test_a_killed_driver_engine_and_rank_change_neither_weights_nor_metrics(assets, tmp_path):
    """The engine that is not killed is the same process to the end; weights of policy and critic,
    metrics and prompts equal those of an undisturbed run, and no finished group is generated again.
    """
    with start(tmp_path / "undisturbed") as undisturbed:
        undisturbed.done()
    survivors = []
    with start(tmp_path / "killed") as run:
        for number, (step, role) in enumerate(KILLED_AFTER.items(), start=1):
            run.until(lambda: run.step >= step, f"step {step}")  # noqa: B023
            survivors.append(run.processes(r"engine-0-server\.log"))
            if role == "driver":
                run.driver().kill()
            else:
                process_of(run.folder / "attempts/0" / LOGS[role]).kill()
            killed_at, reached = time.monotonic(), run.step
            run.until(lambda: run.step > reached, "a newly trained step")  # noqa: B023
            seconds = time.monotonic() - killed_at
            run.until(lambda: len(run.recovered) >= number, f"recovery of the {role}")  # noqa: B023
            print(f"KILL {number} of the {role}: {seconds:.1f} s to a newly trained step")
        survivors.append(run.processes(r"engine-0-server\.log"))
        run.done()
    assert survivors[0] and all(processes == survivors[0] for processes in survivors)
    assert not run.processes(r".*\.log"), "detached workers end with the attempt"
    assert run.weights == undisturbed.weights
    critic, expected = digests_of_critic(run), digests_of_critic(undisturbed)
    assert expected and {name for name in expected if critic[name] != expected[name]} == set()
    assert run.lines == undisturbed.lines and len(run.lines) >= NUM_STEPS
    prompts = finished_prompts(tmp_path / "killed")
    assert len(set(prompts)) == len(prompts)
    assert prompts == finished_prompts(tmp_path / "undisturbed")
    events = [entry["event"] for entry in run.ledger]
    assert (events.count("started"), events.count("ready")) == (1, 1)
    seconds = [entry["seconds"] for entry in run.recovered]
    print("recovered after", seconds, "s; load", os.getloadavg())
    assert [entry["role"] for entry in run.recovered] == list(KILLED_AFTER.values())
    (driver_entry,) = [entry for entry in run.recovered if entry["role"] == "driver"]
    assert driver_entry["incarnation"] == 1
    (of_rank,) = [entry for entry in run.recovered if entry["role"] == "trainer"]
    assert of_rank["ranks"] == [1] and of_rank["steps_again"] > 0
