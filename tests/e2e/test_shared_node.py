"""A whole run on a node that another user shares: every port it listens on and every path it makes,
then kills of its driver, an engine and a rank of its trainer, then TERM.

The run trains a critic and sends slices of weights: real Ray, Megatron, SGLang. Each answer is
requested from an engine, but its text is a function of the prompt (tests/e2e/crash_answers.py), and
the groups of each step are recorded. An undisturbed run trains on the recording; the two must be
equal bit for bit.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from common.port_blocks import BLOCK_SIZE
from rlpost.durable.recorded import read_groups
from tests.e2e import crash_answers
from tests.e2e.local_run import LocalRun
from tests.e2e.runs import ROOT
from tests.e2e.stranger import (
    DECLARED,
    DECLARED_PATHS,
    GLOO,
    OPEN_PAGES,
    SEEN_AS,
    WHY_NOT,
    Listener,
    Node,
    kind_of,
)

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

SAVED_EVERY, BATCH = 3, 8
TRAINING = (
    *("--save-interval", str(SAVED_EVERY), "--eval-interval", "none"),
    *("--rollout-batch-size", str(BATCH), "--n-samples-per-prompt", "4"),
    *("--global-batch-size", "32", "--rm-type", "exact_match"),
    *("--advantage-estimator", "ppo", "--critic-lr", "1e-3", "--lambd", "0.95"),
)
RECORDING = "{rollout_id}.jsonl"
SETTINGS = (
    *TRAINING,
    *("--num-rollout", "3000", "--rollout-health-check-interval", "1"),
    *("--use-prometheus", "--ray-dashboard", "--update-weight-transport", "slices"),
    *("--custom-generate-function-path", f"{SEEN_AS}/answers.py:answer"),
    *("--dynamic-sampling-filter-path", f"{SEEN_AS}/answers.py:is_wanted"),
    *("--save-debug-rollout-data", f"{SEEN_AS}/{RECORDING}"),
)
SLOW, FAST = "5", "1"
"""Factors of an answer's pause: while the stranger attacks, steps take seconds and little of a
processor.
"""
LOGS = {"driver": r"driver\.log", "engine": r"engine-1-server\.log", "trainer": r"actor-1\.log"}
"""The log that a process to be killed writes, by its role, in the order of the kills."""
OF_GENERATION = {f"rollout/{name}" for name in ("num_filtered", "num_unfinished", "wasted_tokens")}
"""Metrics that a run which only trains has not."""
FETCHED = BATCH * crash_answers.DROPPED // (crash_answers.DROPPED - 1)
"""Prompts of a step: every fifth is dropped."""


@dataclass(frozen=True)
class Ended:
    """A run that was killed and got TERM.

    Attributes:
        engines: processes of the engine that was not killed, before each kill and at the end.
        alive: processes that were left a minute after the end.
        step: the last step, which has a checkpoint.
    """

    run: LocalRun
    engines: list[set[int]]
    alive: list[psutil.Process]
    step: int


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("node"))
    yield node
    node.holder.kill()
    node.holder.wait()


@pytest.fixture(scope="module")
def run(assets: Path, node: Node) -> Iterator[LocalRun]:
    prefix = [*node.enter, "sh", "-c", f'cd {ROOT} && exec "$@"', "sh"]
    shutil.copy(crash_answers.__file__, node.folder / "answers.py")
    set_pace(node, SLOW)
    with LocalRun(node.folder, SETTINGS, prefix=prefix, seen_as=SEEN_AS) as run:
        run.until(lambda: run.step >= 1, "step 1")
        yield run


def set_pace(node: Node, factor: str) -> None:
    path = node.folder / "answers.slowness"
    path.with_suffix(".new").write_text(factor)
    path.with_suffix(".new").replace(path)


@pytest.fixture(scope="module")
def listeners(run: LocalRun, node: Node) -> list[Listener]:
    return node.listeners()


@pytest.fixture(scope="module")
def base(listeners: list[Listener]) -> int:
    (gcs,) = (one.port for one in listeners if one.kind == "gcs")
    return gcs - 1


@pytest.fixture(scope="module")
def stranger(node: Node, listeners: list[Listener]) -> dict[str, Any]:
    """What another user of the node reached."""
    return node.attack(listeners)


def test_every_port_is_declared(node: Node, listeners: list[Listener], base: int) -> None:
    unknown = []
    for one in listeners:
        offsets = DECLARED.get(one.where, ())
        offset = one.port - base
        known = any(
            offset in some if isinstance(some, range) else offset == some for some in offsets
        )
        if not known and not (GLOO in offsets and one.port not in range(base, base + BLOCK_SIZE)):
            unknown.append(one)
    assert not unknown
    assert {one.where for one in listeners} == DECLARED.keys(), "declared, and not there"
    assert not node.output("ss", "-lunH"), "UDP"
    assert not [line for line in node.output("ss", "-lxnH").splitlines() if " @" in line]


def test_the_stranger_reads_and_writes_no_store(stranger: dict[str, Any]) -> None:
    assert not stranger["stores"]


def test_the_stranger_gets_no_page_but_those_that_say_nothing(
    stranger: dict[str, Any], listeners: list[Listener]
) -> None:
    kinds = {str(one.port): one.where for one in listeners}
    answered = {
        (*kinds[address.rpartition(":")[2]], page)
        for address, pages in stranger["pages"].items()
        for page in pages
    }
    allowed = {(*where, page) for where, pages in OPEN_PAGES.items() for page in pages}
    assert answered <= allowed, answered - allowed


def test_every_path_is_declared_and_private(node: Node, run: LocalRun) -> None:
    """The names that the stranger took before are not used."""
    made = [path for path in node.paths() if path not in node.theirs]
    assert made
    for path in made:
        folder = str(path.parent).partition("/root")[2]
        assert re.fullmatch(DECLARED_PATHS[folder], path.name), path
        status = path.stat()
        assert status.st_uid == os.geteuid() and not status.st_mode & 0o077, path
    assert not [path for taken in node.theirs for path in taken.iterdir()], "used by the run"


def test_the_stranger_enters_no_folder_and_reads_no_environment(stranger: dict[str, Any]) -> None:
    assert not stranger["paths"] and not stranger["environ"]


def test_processes_keep_compiled_kernels_and_temporary_files_out_of_tmp(
    node: Node, run: LocalRun
) -> None:
    """Also where nothing was compiled in this run. Processes that write their title over their
    environment inherit it from these.
    """
    variables: dict[str, list[tuple[str, str]]] = {"TORCHINDUCTOR_CACHE_DIR": [], "TMPDIR": []}
    for process in node.processes():
        kind = kind_of(process.pid)
        for name in variables if kind in {"driver", "raylet", "engine"} else ():
            variables[name].append((kind, process.environ().get(name, "")))
    for name, found in variables.items():
        assert {kind for kind, _ in found} == {"driver", "engine", "raylet"}
        bad = [one for one in found if not one[1].startswith(("/tmp/rl", str(Path.home())))]
        assert not bad, name


@pytest.fixture(scope="module")
def ended(node: Node, run: LocalRun) -> Ended:
    """The run after the kills and TERM. After the driver's death and the rank's, steps since the last
    checkpoint are trained again.
    """
    set_pace(node, FAST)
    engines = []
    for number, (role, log) in enumerate(LOGS.items(), start=1):
        if role != "engine":
            run.until(lambda: run.step % SAVED_EVERY > 0, f"a step to kill the {role} after")
        engines.append(run.processes(r"engine-0-server\.log"))
        if role == "driver":
            process = run.driver()
            assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
        else:
            processes = [psutil.Process(pid) for pid in run.processes(log)]
            process = min(processes, key=psutil.Process.create_time)  # an engine's has children
        process.kill()
        killed_at, reached = time.monotonic(), run.step
        run.until(lambda: run.step > reached, "a newly trained step")  # noqa: B023
        seconds = time.monotonic() - killed_at
        run.until(lambda: len(run.recovered) >= number, f"recovery of the {role}")  # noqa: B023
        print(f"KILL {number} of the {role}: {seconds:.1f} s to a newly trained step")
    engines.append(run.processes(r"engine-0-server\.log"))
    for process in node.processes():
        if "slurm.local" in process.cmdline():  # the batch script of a local run
            process.send_signal(signal.SIGTERM)
    run.process.wait(120)
    _, alive = psutil.wait_procs(node.processes(), timeout=60)
    return Ended(run, engines, alive, run.step)


def test_nothing_is_left_after_processes_were_killed_and_the_run_got_term(
    node: Node, ended: Ended
) -> None:
    assert not ended.alive
    assert set(node.paths()) == node.theirs
    committed = [entry["step"] for entry in ended.run.ledger if entry["event"] == "committed"]
    assert committed[-1] == ended.step, "TERM saves a checkpoint"


def test_a_killed_driver_engine_and_rank_are_replaced_within_the_attempt(ended: Ended) -> None:
    """The engine that is not killed is the same process to the end, and gets slices also from the
    next driver, which adopts it.
    """
    run = ended.run
    assert ended.engines[0] and all(processes == ended.engines[0] for processes in ended.engines)
    assert run.num_plans_of_slices() >= 1 + len(LOGS)
    events = [entry["event"] for entry in run.ledger]
    assert (events.count("started"), events.count("ready")) == (1, 1)
    print("recovered after", [entry["seconds"] for entry in run.recovered], os.getloadavg())
    assert [entry["role"] for entry in run.recovered] == [*LOGS]
    of_driver, _, of_rank = run.recovered
    assert of_driver["incarnation"] == 1
    assert of_rank["ranks"] == [1] and of_rank["steps_again"] > 0


def test_kills_change_neither_prompts_nor_answers(node: Node, ended: Ended) -> None:
    """Each step trains the wanted of the next prompts; no finished group is generated again."""
    lines = (node.folder / "answers.finished").read_text().splitlines()
    prompts = [int(line.split()[0]) for line in lines]
    assert len(set(prompts)) == len(prompts)
    assert {*range(ended.step * FETCHED)} <= {*prompts}
    for line in ended.run.lines:
        assert (line["rollout/num_filtered"], line["rollout/num_unfinished"]) == (
            FETCHED - BATCH,
            0,
        )
    for step in range(ended.step):
        fetched = range(step * FETCHED, (step + 1) * FETCHED)
        groups = read_groups(str(node.folder / RECORDING), step)
        trained = sorted(group.prompt_id for group in groups)
        assert trained == [prompt for prompt in fetched if prompt % crash_answers.DROPPED]


def test_kills_change_neither_weights_nor_metrics(node: Node, ended: Ended, tmp_path: Path) -> None:
    """Policy, optimizer and critic of the last checkpoint equal those of an undisturbed run, which
    only trains.
    """
    more = ("--debug-train-only", "--load-debug-rollout-data", str(node.folder / RECORDING))
    settings = (*TRAINING, *more, "--num-rollout", str(ended.step))
    with LocalRun(tmp_path, settings) as undisturbed:
        undisturbed.done()
    lines, expected_lines = (
        [{key: line[key] for key in line.keys() - OF_GENERATION} for line in run.lines]
        for run in (ended.run, undisturbed)
    )
    assert lines == expected_lines and len(lines) == ended.step
    for part in (".", "critic"):
        tensors, expected = (
            digests(run.folder / f"checkpoints/iter_{ended.step:07d}" / part, tmp_path)
            for run in (ended.run, undisturbed)
        )
        assert expected and {name for name in expected if tensors[name] != expected[name]} == set()


def digests(folder: Path, home: Path) -> dict[str, str]:
    """Return the SHA-256 of each tensor and object of a checkpoint's part, by name.

    Which of a rank's files holds a tensor may differ.
    """
    dcp_to_torch_save(folder, whole := home / "whole.pt")
    content = torch.load(whole, weights_only=False)
    whole.unlink()
    return {name: digest(value) for name, value in content.items()}


def digest(value: object) -> str:
    """Return the SHA-256 of the bytes of a tensor or of an object's pickle."""
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.contiguous().view(torch.uint8).numpy()).hexdigest()
    content = value.getvalue() if hasattr(value, "getvalue") else repr(value).encode()
    return hashlib.sha256(content).hexdigest()
