"""Precision, learning rate and checkpoints of the optimizer, with real Megatron over gloo."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlpost.config.tree import Config
from rlpost.config.wording import with_values
from rlpost.errors import ConfigError
from tests.contract.actor_ranks import Files, hash_of_saved, run_ranks, save_beside_training
from tests.contract.families import make_family
from tests.contract.optimizer_ranks import restart_from_weights, train_and_look_inside
from tests.contract.samples import STEPS
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)

# weights of 0.2 have steps of 1e-3 in bfloat16: Adam moves them by a hundredth of that
SMALL = dict(lr=1e-5, adam_eps=1e-4, distributed_timeout_minutes=2)
KINDS: dict[str, tuple[str, int, dict[str, Any]]] = {  # model, ranks, settings
    "plain": ("qwen3", 1, {"use_distributed_optimizer": False}),
    "distributed, with experts": ("glm4.5-moe", 2, {"expert_model_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("optimizer")
    for name in ("qwen3", "glm4.5-moe"):
        make_family(folder / name, name)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_updates_below_bfloat16_resolution_are_kept_and_survive_a_resume_bit_for_bit(
    models, tmp_path, kind
):
    """Main weights and moments are float32.

    After a resume they equal those of the uninterrupted run.
    """
    model, num_ranks, layout = KINDS[kind]
    settings = rank_config(str(models / model), bf16=True, **SMALL, **layout)
    saved = str(tmp_path / "saved")
    whole = run_ranks(
        train_and_look_inside, num_ranks, settings, steps=STEPS, files=Files(save=saved)
    )
    resumed = run_ranks(
        train_and_look_inside, num_ranks, settings, steps=STEPS, files=Files(load=saved)
    )
    for ours, theirs in zip(resumed, whole, strict=True):
        assert theirs["types"] == {"torch.bfloat16"} and theirs["adam_types"] == {"torch.float32"}
        assert theirs["finer"]
        assert ours["adam"] == theirs["adam"]
        assert ours["hash"] == theirs["hash"]
        assert ours["metrics"] == theirs["metrics"][2:]


@pytest.fixture(scope="module")
def wide(models: Path) -> tuple[Config, dict[str, Any]]:
    """Return settings in float32, and the result of training with them."""
    settings = rank_config(str(models / "qwen3"), **(SMALL | {"lr": 1e-3}))
    (found,) = run_ranks(train_and_look_inside, 1, settings, steps=STEPS)
    assert found["types"] == {"torch.float32"}
    return settings, found


def test_bfloat16_trains_as_float32_does_within_its_precision(wide):
    settings, expected = wide
    (narrow,) = run_ranks(train_and_look_inside, 1, with_values(settings, bf16=True), steps=STEPS)
    for ours, theirs in zip(narrow["metrics"], expected["metrics"], strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=0.05, abs=0.01)
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=0.1)
        assert ours["train/grad_norm"] != theirs["train/grad_norm"]


def test_optimizer_offload_changes_nothing_without_a_gpu(wide):
    settings, expected = wide
    offloaded = with_values(
        settings,
        optimizer_cpu_offload=True,
        overlap_cpu_optimizer_d2h_h2d=True,
        use_precision_aware_optimizer=True,
    )
    (found,) = run_ranks(train_and_look_inside, 1, offloaded, steps=STEPS)
    assert found == expected


def test_settings_that_need_cuda_or_transformer_engine_are_refused_with_a_remedy():
    import rlpost.trainer.layer_specs as layer_specs
    from rlpost.trainer.kernels import kernel_fields
    from rlpost.trainer.optimizer import _precision

    if layer_specs.has_transformer_engine():
        pytest.skip("TransformerEngine is here")
    assert layer_specs.implementation_of(rank_config("")) == "local"
    narrow = rank_config("", use_precision_aware_optimizer=True, exp_avg_dtype="bf16")
    sparse = SimpleNamespace(fields={"num_moe_experts": 8})
    with pytest.raises(ConfigError, match=r"flex: DeepEP .*choose alltoall"):
        kernel_fields(
            sparse,
            rank_config("", moe_token_dispatcher_type="flex"),
            implementation="local",
        )
    with pytest.raises(ConfigError, match=r"--exp-avg-dtype bf16 needs CUDA .*use fp32"):
        _precision(narrow)


def test_optimizer_offload_with_cuda_sets_the_options_that_megatron_requires(monkeypatch):
    """Megatron-LM refuses --optimizer-cpu-offload without --use-precision-aware-optimizer."""
    import torch

    from rlpost.trainer.optimizer import optimizer_config

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = optimizer_config(
        rank_config("", bf16=True, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    )
    assert made.optimizer_cpu_offload and made.optimizer_offload_fraction == 0.5
    assert made.use_precision_aware_optimizer


def test_a_schedule_continues_after_a_resume_even_without_the_state_of_adam(models, tmp_path):
    """Three steps of a warm-up of four.

    The checkpoint of the second holds only weights and progress.
    """
    settings = rank_config(
        str(models / "qwen3"),
        **(SMALL | {"lr": 4e-4}),
        lr_warmup_iters=4,
        lr_decay_style="cosine",
        lr_decay_iters=10,
        no_save_optim=True,
    )
    files = Files(save=str(tmp_path / "saved"))
    (whole,) = run_ranks(train_and_look_inside, 1, settings, steps=STEPS, files=files)
    assert [one["train/lr"] for one in whole["metrics"]] == pytest.approx([0.0, 1e-4, 2e-4])
    (resumed,) = run_ranks(
        restart_from_weights, 1, settings, folder=str(tmp_path / "saved"), samples=STEPS[2]
    )
    assert (resumed["step"], resumed["num_optimizer_steps"], resumed["moments"]) == (2, 2, 0.0)
    assert resumed["metrics"]["train/lr"] == pytest.approx(2e-4)
    assert resumed["metrics"]["train/loss"] == pytest.approx(
        whole["metrics"][2]["train/loss"], rel=1e-5
    )


SCHEDULES = [
    dict(lr_decay_style="constant"),
    dict(lr_decay_style="constant", lr_warmup_iters=5, lr_warmup_init=1e-5),
    dict(lr_decay_style="linear", lr_warmup_iters=3, min_lr=1e-4),
    dict(lr_decay_style="cosine", lr_warmup_fraction=0.25),
    dict(lr_decay_style="inverse-square-root", lr_warmup_iters=2, min_lr=3e-4),
    *(
        dict(
            lr_decay_style="WSD",
            lr_wsd_decay_style=shape,
            lr_wsd_decay_iters=6,
            lr_warmup_iters=2,
            min_lr=1e-5,
        )
        for shape in ("exponential", "linear", "cosine", "minus_sqrt")
    ),
    dict(weight_decay_incr_style="linear", start_weight_decay=0.0, end_weight_decay=0.2),
    dict(weight_decay_incr_style="cosine", start_weight_decay=0.05, end_weight_decay=0.2),
]


@pytest.mark.parametrize(
    "given", SCHEDULES, ids=lambda given: "-".join(str(value) for value in given.values())
)
def test_learning_rate_and_weight_decay_equal_those_of_megatron_at_every_step(given):
    """Megatron's scheduler advances step by step; rlpost's is a function of the step."""
    import rlpost.trainer  # noqa: F401, I001  its stand-in for CUDA comes before Megatron
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from rlpost.trainer.optimizer import learning_rate, weight_decay

    settings = rank_config("", lr=1e-3, lr_decay_iters=20, weight_decay=0.1, **given)
    group: dict[str, float] = {}
    start, end = settings.optimizer.start_weight_decay, settings.optimizer.end_weight_decay
    warmup = settings.optimizer.lr_warmup_iters
    if settings.optimizer.lr_warmup_fraction is not None:
        warmup = settings.optimizer.lr_warmup_fraction * settings.lr_decay_iters
    theirs = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=settings.optimizer.lr_warmup_init,
        max_lr=settings.optimizer.lr,
        min_lr=settings.optimizer.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=settings.lr_decay_iters,
        lr_decay_style=settings.optimizer.lr_decay_style,
        start_wd=settings.optimizer.weight_decay if start is None else start,
        end_wd=settings.optimizer.weight_decay if end is None else end,
        wd_incr_steps=settings.lr_decay_iters,
        wd_incr_style=settings.optimizer.weight_decay_incr_style,
        wsd_decay_steps=settings.optimizer.lr_wsd_decay_iters,
        lr_wsd_decay_style=settings.optimizer.lr_wsd_decay_style,
    )
    for num_steps in range(25):
        assert learning_rate(settings, num_steps) == pytest.approx(
            group["lr"], rel=1e-12, abs=1e-18
        )
        assert weight_decay(settings, num_steps) == pytest.approx(group["weight_decay"], rel=1e-12)
        theirs.step(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_background_save_holds_the_step_at_which_it_started(models, tmp_path, kind):
    """Weights and moments equal those of a blocking save.

    Two more steps are trained before the background save finishes. A later save holds other weights
    (NeMo-RL issue 3312: it held the first ones again).
    """
    model, num_ranks, layout = KINDS[kind]
    settings = rank_config(str(models / model), **SMALL, **layout)
    folders = [str(tmp_path / name) for name in ("waited", "beside", "later")]
    hashes = run_ranks(save_beside_training, num_ranks, settings, steps=STEPS, folders=folders)[0]
    waited, beside, later = (
        run_ranks(hash_of_saved, num_ranks, settings, folder=folder)[0] for folder in folders
    )
    assert [one[0] for one in (waited, beside, later)] == hashes
    assert waited == beside and later[0] != beside[0]
