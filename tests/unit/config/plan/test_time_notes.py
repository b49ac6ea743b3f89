"""Notes about time appear where a setting costs it without need, and only there."""

import pytest

from rlpost.config.load import load
from rlpost.config.plan.shape import Shape
from rlpost.config.plan.time_notes import START_S, loading_note, recompute_note

DENSE = Shape(
    hidden=1024, ffn=4096, heads=8, groups=8, head_dim=128, vocab=32768, sparse=(False,) * 16
)
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
GB = 10**9


def note(gpu_bytes, **perf):
    rows = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 65536}
    config = load([], {"perf": rows | perf, "grpo": {"loss_type": "sft_loss"}}).config
    sizes = {"gpu_bytes": gpu_bytes, "engine_width": 2, "teacher": None}
    return recompute_note(config, DENSE, sizes)


def test_recomputation_is_noted_where_memory_does_not_need_it():
    assert "--recompute-granularity full" in note(1000 * GB, **FULL)
    assert note(20 * GB, **FULL) is None
    assert note(1000 * GB) is None


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
