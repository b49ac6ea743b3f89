"""A rank that fails in an exchange of whole tensors fails all ranks alike, within seconds."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from rlpost.driver.decision import lost_peer_or_device
from tests.ports import free_port
from tests.unit.trainer.weights import failing_ranks
from tests.unit.trainer.weights.failing_ranks import CASES, FAILURES, LOST
from tests.unit.trainer.weights.quantised_ranks import WORLD, hugging_face

Found = dict[tuple[str, str], list[tuple[Any, ...]]]
WITHIN_S = 20
"""Of a failure; the ranks would wait for each other 10 minutes."""
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """For each layout and failure what each rank raised, the groups left, and a hash after it."""
    folder: Path = tmp_path_factory.mktemp("exports")
    save_file(hugging_face(), folder / "model.safetensors")
    (folder / "config.json").write_text('{"architectures": ["Tiny"]}')
    context = multiprocessing.get_context("spawn")
    results, port = context.SimpleQueue(), free_port()
    ranks = [
        context.Process(target=failing_ranks.run, args=(rank, port, folder, results), daemon=True)
        for rank in range(WORLD)
    ]
    for process in ranks:
        process.start()
    count = WORLD * (len(CASES) * len(FAILURES) + 1) + 1  # the gather; of the killed one nothing
    answers: Found = {}
    try:
        for _ in range(count):
            assert results._reader.poll(120), "a rank waits for another one"
            case, name, rank, *about = results.get()
            answers.setdefault((case, name), []).append((rank, *about))
    finally:
        for process in ranks:
            process.join(20)
            process.kill()
    return {key: [tuple(about) for _, *about in sorted(ranks)] for key, ranks in answers.items()}


TEXTS = {
    "disk full": ("CheckpointError", "rank 1: [Errno 28] No space left on device"),
    "no sync": ("CheckpointError", "rank 1: [Errno 28] No space left on device"),
    "no memory to pack": ("CheckpointError", "rank 1: out of memory"),
    "no memory for a bucket": ("WeightError", "cannot hash the weights: rank 1: out of memory"),
    "no memory to hash": ("WeightError", "cannot hash the weights: rank 1: out of memory"),
    "no memory to reserve": ("WeightError", "cannot hash the weights: rank 1: out of memory"),
    "no description": ("WeightError", "rank 1: 'decoder.layers.0'"),
    "a tensor missing": ("WeightError", f"{LOST} (256, 512): "),
    "no memory to join": ("WeightError", "rank 1: out of memory"),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_all_ranks_raise_the_failure_of_one(found: Found, case: str, failure: str) -> None:
    ranks = found[case, failure]
    assert len(ranks) == WORLD
    kind, text = TEXTS[failure]
    if (case, failure) == ("pipeline", "a tensor missing"):
        text = "nothing was raised"  # it is of the first stage
        kind = ""
    for (raised, said, seconds), left, weights in ranks:
        assert (raised, text in said) == (kind, True), said
        assert said == ranks[0][0][1]
        assert seconds < WITHIN_S
        assert left == 0, "the temporary group is destroyed"
        assert weights == found[CASES[0].name, "disk full"][0][2], "the ranks are in step"


def test_a_failure_before_a_gather_does_not_keep_the_others_in_it(found: Found) -> None:
    (first, *_), (second, *_) = found["tensor", "gather"]
    assert first[:2] == ("", "nothing was raised")
    assert second[:2] == ("MemoryError", "out of memory")
    assert first[2] < WITHIN_S


def test_a_killed_rank_ends_the_exchange_of_the_others(found: Found) -> None:
    """With an error by which the driver recognises that a peer died."""
    ((raised, said, seconds), left, _) = found["tensor", "killed"][0]
    assert raised == "RuntimeError" and lost_peer_or_device(said), said
    assert seconds < WITHIN_S and left == 0
