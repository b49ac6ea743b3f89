"""Ways of the weights that cannot be are named, with what would do."""

import pytest

from rlpost.config.checks.sync import load_format_problems, sync_problems
from rlpost.config.engine_args import engine_args
from rlpost.config.load import load

DELTA = {"update_weight_mode": "delta", "update_weight_transport": "disk"}


def problems(sync, **groups):
    return sync_problems(load([], {"sync": sync, "rollout": {"num_rollout": 1}, **groups}).config)


@pytest.mark.parametrize(
    "fine",
    [
        {},
        {"update_weight_transport": "disk"},
        DELTA,
        {**DELTA, "update_weight_local_checkpoint_dir": "/dev/shm"},
    ],
)
def test_what_goes_together_has_no_problem(fine):
    assert problems(fine) == []


@pytest.mark.parametrize(
    ("sync", "groups", "words"),
    [
        (
            {"update_weight_mode": "delta"},
            {},
            ["--update-weight-mode delta", "use --update-weight-transport disk"],
        ),
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


BACKUP = "enable_draft_weights_cpu_backup"
DRAFTING = {"sglang_speculative_algorithm": "EAGLE"}
COLOCATED = {"colocate": True}


@pytest.mark.parametrize(
    ("cluster", "sglang", "is_trained"),
    [
        (COLOCATED, {}, False),
        (COLOCATED, DRAFTING, True),
        (COLOCATED, DRAFTING | {"sglang_enable_weights_cpu_backup": True}, False),
        (COLOCATED, {"sglang_speculative_algorithm": "NGRAM"}, False),
        ({"rollout_num_gpus": 2}, DRAFTING, False),
    ],
)
def test_weights_of_a_draft_model_that_come_back_need_no_backup(cluster, sglang, is_trained):
    groups = {"cluster": cluster, "sglang": sglang, "grpo": {"enable_mtp_training": is_trained}}
    assert BACKUP not in engine_args(load([], groups).config)


@pytest.mark.parametrize(
    ("sglang", "is_trained"),
    [(DRAFTING, False), (DRAFTING | {"sglang_speculative_draft_model_path": "/other"}, True)],
)
def test_engines_keep_a_draft_model_that_an_offload_would_lose(sglang, is_trained):
    groups = {"cluster": COLOCATED, "sglang": sglang, "grpo": {"enable_mtp_training": is_trained}}
    assert engine_args(load([], groups).config)[BACKUP] is True


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ({}, ""),
        ({"sync": {"update_weight_transport": "disk"}}, "--update-weight-transport disk"),
        ({"sync": DELTA}, "--update-weight-transport disk"),
        ({"debug": {"debug_rollout_only": True}}, "--debug-rollout-only true"),
        ({"sglang": {"sglang_speculative_algorithm": "EAGLE"}}, "--sglang-speculative-algorithm"),
    ],
)
def test_engines_start_with_random_weights_only_where_an_update_fills_all(groups, reason):
    sglang = {"sglang_load_format": "dummy"} | groups.get("sglang", {})
    found = load_format_problems(load([], groups | {"sglang": sglang}).config)
    assert len(found) == bool(reason)
    assert all(one.startswith(f"--sglang-load-format dummy with {reason}") for one in found)
    assert load_format_problems(load([], groups).config) == []
