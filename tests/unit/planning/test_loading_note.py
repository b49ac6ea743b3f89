"""Weights that the deadline of a start is too short for are named, and only those."""

import pytest

from rlpost.config.checks.layout import cold_start_note
from rlpost.config.load import load
from rlpost.config.plan.hf_shape import hf_shape
from rlpost.extensions.planning.loading_note import START_S, loading_note
from tests.unit.config.test_models import PUBLISHED

GB = 10**9


@pytest.mark.parametrize(("num_bytes", "is_slow"), [(8 * GB, False), (470 * GB, True)])
def test_a_model_that_the_default_deadline_is_too_short_for_is_named(num_bytes, is_slow):
    config = load([], {}).config
    line = loading_note(config, "[engines.teacher]", num_bytes)
    assert (line is not None) is is_slow
    if line is not None:
        assert line.startswith("[engines.teacher]: 470 GB") and "1.3 GB/s" in line
        longer = int(line.rpartition("--bringup-deadline-s ")[2].split()[0])
        enough = load([], {"cluster": {"bringup_deadline_s": longer}}).config
        assert loading_note(enough, "[engines.teacher]", num_bytes) is None


def test_a_deadline_shorter_than_a_start_leaves_no_time():
    config = load([], {"cluster": {"bringup_deadline_s": START_S}}).config
    assert "leaves no time" in loading_note(config, "policy", GB)


@pytest.mark.parametrize(
    ("model", "stages", "minutes", "has_note"),
    [
        ("qwen3_next_80b_a3b", 2, 10, True),
        ("qwen3_next_80b_a3b", 2, 30, False),
        ("qwen3_next_80b_a3b", 1, 10, False),
        ("qwen3_4b", 2, 10, False),
    ],
)
def test_stages_that_wait_for_a_compiling_one_get_a_longer_timeout(
    model, stages, minutes, has_note
):
    perf = {"pipeline_model_parallel_size": stages}
    tables = {"perf": perf, "cluster": {"distributed_timeout_minutes": minutes}}
    config = load([], tables).config
    assert (cold_start_note(config, hf_shape(PUBLISHED[model])) is not None) == has_note
