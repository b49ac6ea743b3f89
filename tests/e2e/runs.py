"""A run on the lab's Slurm, read from its folder and its job."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rlpost.observe.writer import read_metrics
from tests.cluster.jobs import job_info, until
from tests.cluster.lab import Lab
from tests.processes import living, output_of

ROOT = Path(__file__).parents[2]
RECIPE = "jobs/recipes/tiny.toml"
NUM_STEPS, SAVED_EVERY = 8, 4
TRAINING = [
    *("--num-rollout", str(NUM_STEPS), "--rollout-batch-size", "16"),
    *("--save-interval", str(SAVED_EVERY), "--eval-interval", str(SAVED_EVERY)),
    *("--eval-prompt-data", "heldout", "assets/tiny/heldout.jsonl@[0:100]"),
]
SETTINGS = [*TRAINING, "--partition", "low", "--max-failures", "0"]
RUN_DEADLINE_S = 900.0
USER_ENVIRONMENT = {
    **dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY"), "http://127.0.0.1:9"),
    **{
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "7",
        "MASTER_ADDR": "10.9.9.9",
        "MASTER_PORT": "1",
    },
    **{"RAY_ADDRESS": "10.9.9.9:6379", "TMPDIR": "/nonexistent", "LANG": "tr_TR.UTF-8"},
}
"""Variables of a user's environment that must not disturb a run: proxies, ranks of another launcher, an
address of another Ray cluster, a missing temporary folder, a locale.
"""
HF_TOKEN, WANDB_KEY = "hf_" + "t0k3n" * 7, "wb" * 20


@dataclass
class Run:
    """The folder of a run, and its job."""

    lab: Lab
    folder: Path
    job: str = ""
    searched: list[str] = field(default_factory=list)
    """Lines that the search for the user's keys printed on the nodes while the run trained."""

    @property
    def metrics(self) -> list[dict[str, float]]:
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def ledger(self) -> list[dict]:
        path = self.folder / "ledger.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def events(self, name: str) -> list[dict]:
        return [line for line in self.ledger if line["event"] == name]

    def log(self, attempt: int, name: str = "driver.log") -> str:
        return (self.folder / "attempts" / str(attempt) / name).read_text()

    def verdict(self, attempt: int) -> str:
        return self.log(attempt, "verdict").strip()

    def logs(self) -> str:
        """Return the ends of all logs, for the message of a failure."""
        logs = sorted(self.folder.glob("attempts/*/driver.log")) + sorted(self.folder.glob("*.out"))
        logs += sorted(self.folder.glob("attempts/*/agent-*.log"))
        return "\n".join(
            f"--- {path}\n" + "\n".join(path.read_text().splitlines()[-25:]) for path in logs
        )


def process_of(log: Path) -> psutil.Process:
    """The process whose output is this log."""
    for process in living():
        if output_of(process) == str(log):
            return process
    raise AssertionError(f"no process writes {log}")


def until_over(run: Run) -> None:
    """Wait until the job has ended, and assert that it has completed."""
    until(
        lambda: job_info(run.lab, run.job).state.is_over,
        run.lab,
        "the run is over",
        deadline_s=RUN_DEADLINE_S,
    )
    state = job_info(run.lab, run.job).state
    assert state == "COMPLETED", f"{state}\n{run.logs()}"


def comparable(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return metrics lines without times, machine figures, counts of restarts and evaluations.

    Training is compared to the last bit. Evaluations decode greedily, but which requests an engine
    batches together changes the last bits of its logits, so they are compared with a tolerance.
    """
    left_out = ("time", "eval", "perf", "sync", "checkpoint", "driver", "engines", "memory", "run")
    return [
        {key: value for key, value in line.items() if key.split("/")[0] not in left_out}
        for line in lines
    ]


def evaluations(lines: list[dict[str, float]]) -> dict[float, float]:
    """Return the reward on the held-out prompts by step."""
    return {
        line["step"]: line["eval/heldout/reward_mean"]
        for line in lines
        if "eval/heldout/reward_mean" in line
    }
