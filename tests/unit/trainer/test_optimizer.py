"""Adam's settings: those of a run take precedence over a checkpoint's; what offload excludes."""

from types import SimpleNamespace

import pytest
import torch

from rlpost.config.wording import with_values
from rlpost.errors import ConfigError
from rlpost.trainer import optimizer
from rlpost.trainer.optimizer import apply_schedule
from tests.settings import rank_config

NARROW = rank_config("", use_precision_aware_optimizer=True, exp_avg_dtype="bf16")


def test_before_each_step_the_hyperparameters_are_those_of_the_settings():
    loaded = {"lr": 9.0, "weight_decay": 9.0, "betas": (0.5, 0.5), "eps": 9.0}
    groups = [dict(loaded), loaded | {"wd_mult": 0.0}]
    settings = rank_config(
        "", lr=1e-3, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.98, adam_eps=1e-6
    )
    assert apply_schedule(SimpleNamespace(param_groups=groups), settings, 0) == 1e-3
    now = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.8, 0.98), "eps": 1e-6}
    assert groups == [now, now | {"weight_decay": 0.0, "wd_mult": 0.0}]


@pytest.mark.parametrize(
    ("changes", "dtype", "message"),
    [
        (
            {"use_distributed_optimizer": False},
            torch.bfloat16,
            "needs --use-distributed-optimizer true",
        ),
        (
            {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"},
            torch.bfloat16,
            "--exp-avg-dtype bf16 .*--optimizer-cpu-offload, whose state is float32",
        ),
        ({}, torch.float32, "needs weights in bfloat16"),
    ],
)
def test_settings_that_offload_of_the_optimizer_excludes_are_refused(changes, dtype, message):
    offloaded = rank_config("", optimizer_cpu_offload=True)
    optimizer._check_hybrid(offloaded, torch.bfloat16)
    with pytest.raises(ConfigError, match=message):
        optimizer._check_hybrid(with_values(offloaded, **changes), dtype)


def test_dtypes_of_the_state_need_cuda_and_transformer_engine(monkeypatch):
    assert optimizer._precision(rank_config("")) == {}
    wide = rank_config("", use_precision_aware_optimizer=True)
    monkeypatch.setattr(optimizer, "has_transformer_engine", lambda: False)
    assert optimizer._precision(wide) == {}
    with pytest.raises(ConfigError, match=r"--exp-avg-dtype bf16 needs CUDA .*use fp32"):
        optimizer._precision(NARROW)
    monkeypatch.setattr(optimizer, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fields = optimizer._precision(NARROW)
    assert fields["use_precision_aware_optimizer"] is True
    assert fields["exp_avg_dtype"] == torch.bfloat16 and fields["main_grads_dtype"] == torch.float32


def test_weights_of_adam_in_host_memory_are_pinned_and_stay_the_same_tensors(monkeypatch):
    """Megatron finds everything else of a weight by its tensor."""
    weights = [torch.nn.Parameter(torch.rand(size)) for size in (3, 700, 1)]
    held = SimpleNamespace(cpu_copys_map_gpu_param={weight: object() for weight in weights})
    before = [weight.detach().clone() for weight in weights]
    pinned: list[bool] = []
    empty = torch.empty

    def on_host(size: int, *, pin_memory: bool, **options: object) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(size, **options)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", on_host)
    optimizer.pin_weights(held)
    assert pinned == [True], "in one piece"
    assert list(held.cpu_copys_map_gpu_param) == weights
    assert all(map(torch.equal, weights, before))
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1


def test_torchs_adam_updates_weight_by_weight_and_so_does_what_replaces_it():
    """All at once it needs 4 bytes for each parameter; the groups pass the choice on to Muon."""
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    for one in (adam, other):
        optimizer.update_one_by_one(one)
    assert [group["foreach"] for group in adam.param_groups] == [False]
    assert [group["foreach"] for group in other.param_groups] == [None]
