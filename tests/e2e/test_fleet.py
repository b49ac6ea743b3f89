"""A run whose engines join and leave, and a run with its own engine that is preempted with USR2: a
real Slurm, Ray, Megatron and SGLang. Both train the same LoRA adapters and end with equal weights,
although the first sends merged weights and the second adapters alone. They run at the same time.

``--kills 100`` disturbs the run as often: its agent, node, batch shell, driver, ranks and engine.
"""

import random
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from common.exit_codes import EXIT_PREEMPTED
from rlpost.extensions.fleet.fleet_view import used_of
from rlpost.observe.writer import read_metrics
from tests.cluster.jobs import job_info, until
from tests.cluster.lab import Lab
from tests.e2e.crashed_run import CrashedRun
from tests.e2e.fleet import LORA, FleetOutcome, run_with_fleet
from tests.e2e.kills import FIRST, Kill, crash_lab, differences, killed, num_steps

ADAPTERS_ALONE = (*LORA, "--update-weight-mode", "adapter")
MOST_BYTES_OF_ADAPTERS = 300_000  # merged weights of the tiny model have 1.8 MB


@pytest.fixture(scope="module")
def lab(slurm_available: None, assets: Path) -> Iterator[Lab]:
    """A node for the run whose engines join and leave, one for them, and one for the other run."""
    with crash_lab() as lab:
        yield lab


@pytest.fixture(scope="module")
def num_kills(pytestconfig: pytest.Config) -> int:
    """Kills of the run without a fleet."""
    return pytestconfig.getoption("--kills")


@pytest.fixture(scope="module")
def killing(
    lab: Lab, num_kills: int, pytestconfig: pytest.Config
) -> Iterator[tuple[CrashedRun, Future[list[Kill]]]]:
    """A run without a fleet while it is killed, and its kills to come."""
    run = CrashedRun(lab, "killed", num_steps(num_kills), settings=ADAPTERS_ALONE)
    rng = random.Random(pytestconfig.getoption("--draw") or 3)
    with ThreadPoolExecutor(1) as pool:
        yield run, pool.submit(killed, run, num_kills, rng)


@pytest.fixture(scope="module")
def fleet(lab: Lab, num_kills: int, killing: tuple[CrashedRun, Future[list[Kill]]]) -> FleetOutcome:
    """The run itself is not disturbed; the engines of its fleet join and leave."""
    return run_with_fleet(lab, num_steps(num_kills))


@pytest.fixture(scope="module")
def killed_run(killing: tuple[CrashedRun, Future[list[Kill]]]) -> tuple[CrashedRun, list[Kill]]:
    """The run that was killed, and its kills."""
    run, kills = killing
    return run, kills.result()


def batch_log(fleet: FleetOutcome, engine: str) -> str:
    return (fleet.run.fleet_folder.logs / f"{engine}.batch").read_text()


def bytes_sent(run: CrashedRun) -> list[float]:
    """Bytes of each update of the weights."""
    lines = read_metrics(run.folder / "metrics.jsonl")
    return [line["sync/weights_bytes"] for line in lines if "sync/weights_bytes" in line]


def test_every_prompt_is_answered_once_and_the_run_ends_in_its_first_attempt(fleet):
    run = fleet.run
    finished = run.finished()
    assert len(set(finished)) == len(finished) > 0
    steps = [line["step"] for line in read_metrics(run.folder / "metrics.jsonl")]
    assert [step for step in steps if step] == list(range(1, run.num_steps + 1))
    assert run.is_done and run.count("attempt") == 1


def test_both_engines_serve_and_are_in_the_table(fleet):
    for engine in (fleet.preempted, fleet.killed):
        (line,) = [one for one in fleet.table.splitlines() if one.startswith(f"{engine} ")]
        assert "RUNNING" in line and "ready" in line
    used = used_of(fleet.run.ledger)
    assert used[fleet.preempted] > 0 and used[fleet.killed] > 0


def test_the_preempted_engine_leaves_with_a_notice_is_requeued_and_serves_again(fleet):
    run, log = fleet.run, batch_log(fleet, fleet.preempted)
    assert "USR2 to the batch script: preemption" in log and f"srun exit {EXIT_PREEMPTED}" in log
    first, second, *_ = run.starts_at(fleet.preempted)
    answers = run.answers_at(fleet.preempted)
    assert any(first <= at <= second for at in answers) and any(at > second for at in answers)


def test_the_killed_engine_is_requeued_and_serves_again(fleet):
    run = fleet.run
    assert "USR2" not in batch_log(fleet, fleet.killed)
    assert max(run.answers_at(fleet.killed)) > run.starts_at(fleet.killed)[1]


def test_the_drained_engine_ends_and_the_other_leaves_when_the_run_is_done(fleet):
    run = fleet.run
    assert job_info(run.lab, fleet.preempted).state == "COMPLETED"
    until(lambda: run.job_is_over(fleet.killed), run.lab, "the last engine leaves")
    assert job_info(run.lab, fleet.killed).state == "COMPLETED"


def test_the_secret_of_the_fleet_is_in_one_file_and_is_not_that_of_the_attempt(fleet):
    run = fleet.run
    secret = run.fleet_folder.secret().encode()
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert [path for path in files if secret in path.read_bytes()] == [
        run.fleet_folder.root / "secret"
    ]
    attempt_secret = (run.folder / "attempts/0/secret").read_bytes().strip()
    fleet_files = [path for path in run.fleet_folder.root.rglob("*") if path.is_file()]
    assert not [path for path in fleet_files if attempt_secret in path.read_bytes()]


def test_a_killed_run_ends_with_equal_weights_and_every_prompt_once(killed_run, fleet, num_kills):
    run, kills = killed_run
    assert differences(run, fleet.run, [kill.at for kill in kills]) == [], run.tell()
    assert len(kills) == num_kills
    assert [(kill.place, kill.signal) for kill in kills[: len(FIRST)]] == [*FIRST[:num_kills]]


def test_the_killed_run_s_engine_gets_adapters_alone_also_after_a_restart(killed_run, fleet):
    run, _ = killed_run
    sent = bytes_sent(run)
    assert sent and max(sent) < MOST_BYTES_OF_ADAPTERS < min(bytes_sent(fleet.run))
    newest = run.attempt()
    assert newest is not None and newest.name != "0"
    log = (newest / "engine-0-server.log").read_text()
    assert re.search(rf"Lora name=version-{run.num_steps}\b", log)
