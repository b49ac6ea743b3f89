"""Keys of verl's rewards and trainer. Pure data."""

from __future__ import annotations

from rlpost.extensions.importing.peers.common import interval, job_name, text
from rlpost.extensions.importing.peers.row import (
    Given,
    Needless,
    NotHere,
    Row,
    Settings,
    lacking,
    needless,
    row,
    same,
    when,
)

_PAGE = "docs/migrating.md"


REWARD = (
    "verl chooses a reward by data_source and here none is chosen; use --rm-type, or "
    f"--custom-rm-path with a function of two lines ({_PAGE})"
)


OWN_REWARD = (
    "a reward here takes a prompt and a sample; call it in a function of two lines and give that to "
    f"--custom-rm-path ({_PAGE})"
)


def _reward(it: Given) -> Settings:
    raise NotHere(REWARD if it.value is None else OWN_REWARD)


def _overlong(setting: str) -> Row:
    name = {"overlong_buffer_len": "len", "overlong_penalty": "penalty_factor"}[setting]
    base = "reward_kwargs.overlong_buffer_cfg"

    def convert(it: Given) -> Settings:
        manager = it.look("reward.reward_manager.name")
        if not same(it.look(f"reward.{base}.enable"), True) or manager != "dapo":
            raise Needless("the overlong buffer is off: it needs enable=True and the manager dapo")
        return {setting: it.number() if name != "len" else it.count()}

    return row(
        f"reward.{base}.{name} reward_model.{base}.{name} reward_model.overlong_buffer.{name}",
        setting,
        convert,
        note="with the reward manager dapo",
    )


def _max_response(it: Given) -> Settings:
    if not same(it.value, it.look("data.max_response_length")):
        raise NotHere("the overlong buffer ends at --rollout-max-response-len")
    raise Needless("it is data.max_response_length, as here")


def _steps(it: Given) -> Settings:
    if it.value is None:
        raise Needless("total_epochs decides")
    return {"num_rollout": it.count()}


def _epochs(it: Given) -> Settings:
    steps = it.look("trainer.total_training_steps")
    if steps is not None:
        raise NotHere(
            f"verl ends after {it.count()} epochs or {steps} steps, whichever is first; here --num-rollout "
            f"{steps} alone decides, so give fewer where the epochs are shorter"
        )
    return {"num_epoch": it.count()}


def _saves(it: Given) -> Settings:
    if it.count() <= 0:
        raise Needless("a run always saves at its end and at a preemption")
    return {"save_interval": it.count()}


def _first_test(it: Given) -> Settings:
    tests = it.look("trainer.test_freq")
    if not isinstance(tests, int) or tests <= 0:
        if same(it.value, True):
            raise NotHere("without --eval-interval nothing is evaluated; use rlpost evaluate first")
        raise Needless("nothing is evaluated")
    return {"skip_eval_before_train": not it.value}


def _nodes(it: Given) -> Settings:
    return {"actor_num_nodes": it.count()}


def _gpus(it: Given) -> Settings:
    count = it.count()
    return {"num_gpus_per_node": count, "actor_num_gpus_per_node": count}


def _loggers(it: Given) -> Settings:
    words = it.value if isinstance(it.value, list) else [it.value]
    settings: Settings = {}
    if "wandb" in words:
        settings["use_wandb"] = True
    if "tensorboard" in words:
        settings["use_tensorboard"] = True
    others = [word for word in words if word not in ("wandb", "tensorboard", "console", "file")]
    if others:
        raise NotHere(f"no logger {others[0]}; metrics.jsonl has all metrics, or use --use-wandb")
    return settings


def _project(it: Given) -> Settings:
    words = it.look("trainer.logger")
    if "wandb" not in (words if isinstance(words, list) else [words]):
        raise Needless("of W&B, which is off")
    return {"wandb_project": text(it)}


def _kept(it: Given) -> Settings:
    if it.value is None:
        saves = it.look("trainer.save_freq")
        if not isinstance(saves, int) or saves <= 0:
            raise Needless("save_freq is off")
        raise NotHere("verl keeps all checkpoints, rlpost the last --keep-last; see --keep-every")
    return {"keep_last": it.count()}


_REWARD = (
    row(
        "reward.custom_reward_function.path custom_reward_function.path",
        "",
        _reward,
        note="by a function of two lines around it: --custom-rm-path",
        default=None,
    ),
    needless(
        "reward.custom_reward_function.name custom_reward_function.name",
        "goes with custom_reward_function.path",
    ),
    lacking(
        "reward.custom_reward_function.* custom_reward_function.*",
        "a reward reads its own settings (docs/rewards.md)",
    ),
    lacking(
        "reward.reward_manager.name reward_model.reward_manager",
        "use --custom-rm-path, with --group-rm for a whole group (docs/rewards.md)",
        "naive",
        "dapo",
        None,
        default="naive",
    ),
    needless(
        "reward.reward_kwargs.overlong_buffer_cfg.enable "
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable reward_model.overlong_buffer.enable",
        "--overlong-buffer-len turns it on",
    ),
    _overlong("overlong_buffer_len"),
    _overlong("overlong_penalty"),
    needless(
        "reward.reward_kwargs.overlong_buffer_cfg.log "
        "reward_model.reward_kwargs.overlong_buffer_cfg.log reward_model.overlong_buffer.log",
        "metrics.jsonl has every metric",
    ),
    row(
        "reward.reward_kwargs.max_resp_len reward_model.reward_kwargs.max_resp_len",
        "",
        _max_response,
        note="the overlong buffer ends at --rollout-max-response-len",
    ),
    lacking(
        "reward.reward_model.enable reward_model.enable",
        "rewards of a model: --rm-type judge or remote_rm (docs/rewards.md)",
        False,
        None,
    ),
    needless(
        "reward.reward_model.* reward_model.model.* reward_model.rollout.* "
        "reward_model.enable_resource_pool reward_model.n_gpus_per_node reward_model.nnodes "
        "reward_model.micro_batch_size_per_gpu",
        "of a reward model: see its key enable",
    ),
    needless(
        "reward.num_workers reward_model.num_workers reward_model.use_reward_loop "
        "reward_model.launch_reward_fn_async",
        "graders start on demand, --reward-workers",
    ),
    lacking(
        "reward.sandbox_fusion.url sandbox_fusion.url reward_model.sandbox_fusion.url",
        "code is graded in sandboxes of the run (docs/rewards.md)",
        None,
    ),
    needless(
        "reward.sandbox_fusion.* sandbox_fusion.* reward_model.sandbox_fusion.*",
        "of Sandbox Fusion",
    ),
    lacking(
        "reward.reward_manager.* reward_model.reward_loop_*",
        "use --custom-rm-path (docs/rewards.md)",
        None,
        "register",
        "custom_reward_manager",
    ),
    lacking(
        "reward.reward_kwargs.* reward_model.reward_kwargs.* reward.* reward_model.*",
        "a reward reads its own settings (docs/rewards.md)",
        None,
    ),
)


_TRAINER = (
    row("trainer.total_training_steps", "num_rollout", _steps),
    row("trainer.total_epochs", "num_epoch", _epochs, default=30),
    row("trainer.save_freq", "save_interval", _saves, note="steps in both"),
    row(
        "trainer.test_freq",
        "eval_interval",
        interval("eval_interval"),
        note="steps in both",
        default=-1,
    ),
    row(
        "trainer.val_before_train",
        "skip_eval_before_train",
        _first_test,
        note="inverted",
        default=True,
    ),
    row("trainer.nnodes", "actor_num_nodes", _nodes, default=1),
    row("trainer.n_gpus_per_node", "num_gpus_per_node actor_num_gpus_per_node", _gpus, default=8),
    row("trainer.logger", "use_wandb use_tensorboard", _loggers, default=["console", "wandb"]),
    row("trainer.project_name", "wandb_project", _project, default="verl_examples"),
    row("trainer.experiment_name", "job_name", job_name),
    row(
        "trainer.default_local_dir",
        "save",
        lambda it: {"save": text(it)},
        note="without it RUN/checkpoints",
    ),
    row(
        "trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep",
        "keep_last",
        _kept,
        default=None,
    ),
    row("trainer.balance_batch", "balance_data", default=True),
    row(
        "trainer.critic_warmup",
        "num_critic_only_steps",
        when(
            "algorithm.adv_estimator",
            "gae",
            "without gae there is no critic",
            lambda it: {"num_critic_only_steps": max(0, it.count() - 1)},
        ),
        note="verl's N is N - 1 steps",
    ),
    needless(
        "trainer.resume_mode",
        "a requeued run resumes by itself",
        "auto",
        instead="--resume or a new run folder decides; --load gives other checkpoints",
    ),
    lacking("trainer.resume_from_path", "use --load, with checkpoints of rlpost", None),
    lacking("trainer.val_only", "use rlpost evaluate", False),
    lacking("trainer.device", "GPUs are NVIDIA's", "cuda"),
    needless(
        "trainer.log_val_generations trainer.rollout_data_dir trainer.validation_data_dir",
        "the run's page has answers, RUN/report",
    ),
    lacking("trainer.default_hdfs_dir", "checkpoints are on a shared file system", None),
    needless("trainer.esi_redundant_time", "the end of a job's time is known (docs/preemption.md)"),
    needless(
        "trainer.del_local_ckpt_after_load trainer.ray_wait_register_center_timeout "
        "trainer.use_legacy_worker_impl trainer.use_v1",
        "of verl's own workers",
    ),
    lacking(
        "trainer.v1.trainer_mode",
        "use --rollout-mode one_step_off or fully_async with "
        "--max-staleness (docs/rollout.md), and split GPUs without --colocate",
        "sync",
    ),
    needless("trainer.v1.*", "of the asynchronous modes: see trainer.v1.trainer_mode"),
    lacking(
        "async_training.staleness_threshold",
        "a share of stale samples there; --max-staleness counts weight versions (docs/rollout.md)",
        0,
    ),
    lacking("async_training.*", "use --rollout-mode fully_async (docs/rollout.md)"),
    lacking("distillation.enabled", "use --use-opd (docs/distillation.md)", False),
    needless("distillation.*", "of distillation: see distillation.enabled"),
    needless("ray_kwargs.*", "agents of the job start Ray (docs/bringup.md)"),
    needless("global_profiler.* *.profiler.*", "use --profile or --trace-steps (docs/seeing.md)"),
    needless(
        "transfer_queue.* skip.* hydra.* model_engine *.model_engine *._target_",
        "of verl's own programs",
    ),
)


RUN_ROWS = (*_REWARD, *_TRAINER)
