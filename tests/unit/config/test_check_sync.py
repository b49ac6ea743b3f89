"""Ways of the weights that cannot be are named, with what would do."""

import pytest

from rlpost.config.checks.sync import sync_problems
from rlpost.config.load import load

DELTA = {"update_weight_mode": "delta", "update_weight_transport": "disk"}


def problems(sync, **groups):
    return sync_problems(load([], {"sync": sync, "rollout": {"num_rollout": 1}, **groups}).config)


@pytest.mark.parametrize(
    "fine",
    [{}, {"update_weight_transport": "disk"}, DELTA, {**DELTA, "update_weight_local_checkpoint_dir": "/dev/shm"}],
)
def test_what_goes_together_has_no_problem(fine):
    assert problems(fine) == []


@pytest.mark.parametrize(
    ("sync", "groups", "words"),
    [
        ({"update_weight_mode": "delta"}, {}, ["--update-weight-mode delta", "use --update-weight-transport disk"]),
        (DELTA, {"cluster": {"colocate": True}}, ["--update-weight-mode delta", "--colocate true"]),
        (
            {"update_weight_transport": "disk", "update_weight_local_checkpoint_dir": "/dev/shm"},
            {},
            ["dir /dev/shm", "mode full", "use --update-weight-mode delta"],
        ),
        (
            {**DELTA, "update_weight_local_checkpoint_dir": "/dev/shm"},
            {"sglang": {"rollout_external_engine_addrs": ["10.0.0.1:30000"]}},
            ["dir /dev/shm", "--rollout-external-engine-addrs 10", "--update-weight-disk-dir"],
        ),
    ],
)
def test_what_does_not_is_named(sync, groups, words):
    (problem,) = problems(sync, **groups)
    assert problem.startswith("--update-weight-")
    for word in words:
        assert word in problem
