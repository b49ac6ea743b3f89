"""A driver that is killed twice while it generates and trains: real Ray, Megatron, SGLang, router.

Each answer is requested from an engine, but its text is a function of the prompt, so that two runs
can be compared bit for bit (benchmarks/crash_answers.py).
"""

import os
import shutil
import time

import pytest

from benchmarks import crash_answers
from tests.e2e.local_run import LocalRun
from tests.e2e.runs import ADAPTERS

NUM_STEPS = 8
KILLED_AFTER = (3, 6)  # steps; a checkpoint every 4, so that steps are trained again
SETTINGS = (
    *("--num-rollout", str(NUM_STEPS), "--save-interval", "4", "--eval-interval", "none"),
    *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--global-batch-size", "32"),
    *("--rm-type", "exact_match"),
)


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


@pytest.mark.parametrize("more", [[], ADAPTERS], ids=["weights", "adapters"])
def test_a_driver_killed_twice_leaves_the_run_of_one_that_lived(assets, tmp_path, more):
    """Engines are the same processes to the end; weights, metrics and prompts are equal, and no
    finished group is generated again.
    """
    with start(tmp_path / "undisturbed", more) as undisturbed:
        undisturbed.done()
    engines = []
    with start(tmp_path / "killed", more) as run:
        for number, step in enumerate(KILLED_AFTER, start=1):
            run.until(lambda: run.step >= step, f"step {step}")  # noqa: B023
            engines.append(run.processes(r"engine-\d+-server\.log"))
            run.driver().kill()
            killed_at, reached = time.monotonic(), run.step
            run.until(lambda: run.step > reached, "a newly trained step")  # noqa: B023
            seconds = time.monotonic() - killed_at
            print(f"KILL {number} to the driver: {seconds:.1f} s to a newly trained step")
        engines.append(run.processes(r"engine-\d+-server\.log"))
        run.done()
    assert engines[0] and engines[0] == engines[1] == engines[2]
    assert not run.processes(r".*\.log"), "detached workers end with the attempt"
    assert run.weights == undisturbed.weights
    assert run.lines == undisturbed.lines and len(run.lines) >= NUM_STEPS
    prompts = finished_prompts(tmp_path / "killed")
    assert len(set(prompts)) == len(prompts)
    assert prompts == finished_prompts(tmp_path / "undisturbed")
    events = [entry["event"] for entry in run.ledger]
    assert (events.count("started"), events.count("ready")) == (1, 1)
    recovered = [entry for entry in run.ledger if entry["event"] == "recovered"]
    print("recovered after", [entry["seconds"] for entry in recovered], "s; load", os.getloadavg())
    assert [(entry["role"], entry["incarnation"]) for entry in recovered] == [
        ("driver", 1),
        ("driver", 2),
    ]
