"""Engines without a GPU: arguments of SGLang, and the share of the cores."""

import os

import pytest

from rlpost.config.server_arg_values import POOL_WITHOUT_GPUS, server_arg_table
from rlpost.extensions.on_cpu import engine
from rlpost.extensions.on_cpu.engine import ONLY_ON_CUDA, WITHOUT_CUDA, engine_settings


def test_settings_of_the_caller_override_defaults_for_a_cpu() -> None:
    fields = engine_settings({"model_path": "m", "max_running_requests": 3})
    assert fields["device"] == "cpu" and fields["max_running_requests"] == 3
    assert fields["max_total_tokens"] == POOL_WITHOUT_GPUS


def test_settings_without_cuda_are_sglang_s() -> None:
    assert {*WITHOUT_CUDA, *ONLY_ON_CUDA} <= server_arg_table().args.keys()


def test_without_cuda_an_engine_uses_tensor_parallelism_alone() -> None:
    given = {
        "tp_size": 2,
        "enable_dp_attention": True,
        "dp_size": 2,
        "ep_size": 2,
        "moe_dense_tp_size": 1,
    }
    fields = engine_settings(given)
    assert fields["tp_size"] == 2
    assert {name: fields[name] for name in ONLY_ON_CUDA} == dict(ONLY_ON_CUDA)


@pytest.mark.parametrize(("num_sharing", "threads"), [(None, 1), (1, 6), (4, 1), (2, 3), (16, 1)])
def test_an_engine_without_gpus_uses_its_share_of_the_cores(
    num_sharing: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's processes read the variable, which Ray has set to 1."""
    asked: list[int] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(engine, "read_siblings", lambda cpus: {})
    monkeypatch.setattr("torch.set_num_threads", asked.append)
    engine.use_threads(num_sharing)
    assert asked == [threads] and os.environ["OMP_NUM_THREADS"] == str(threads)
