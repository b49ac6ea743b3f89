"""Keys of verl: data, algorithm, reward and trainer. Those of its workers: ``verl_workers``. Pure data.

The keys are those of ``verl.trainer.main_ppo`` at 1dda039 (22 August 2026), and older names of them.
"""

from __future__ import annotations

from rlpost.config.peers.common import FILTER, eval_sets, job_name, paths, text
from rlpost.config.peers.row import (
    Given,
    Needless,
    NotHere,
    Row,
    Settings,
    Stack,
    choice,
    lacking,
    needless,
    row,
    same,
    when,
)
from rlpost.config.peers.verl_workers import WORKERS

_ESTIMATORS: dict[object, object] = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}
_KL_IN_REWARD: dict[object, object] = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "low_var_kl",
    "k3": "low_var_kl",
}
_PAGE = "docs/migrating.md"
REWARD = (
    "verl chooses a reward by data_source and here none is chosen; use --rm-type, or "
    f"--custom-rm-path with a function of two lines ({_PAGE})"
)


def _prompts(it: Given) -> Settings:
    return {"prompt_data": paths(it)}


def _columns(it: Given) -> Settings:
    # The layout of verl's Parquet files: messages, and the answer below reward_model.
    return {
        "input_key": text(it),
        "label_key": "reward_model.ground_truth",
        "apply_chat_template": True,
    }


def _template(it: Given) -> Settings:
    return {"apply_chat_template_kwargs": {it.tail: it.value}}


def _oversampling(it: Given) -> Settings:
    if it.value is None:
        raise Needless("off, as here")
    return {"over_sampling_batch_size": it.count()}


def _estimator(it: Given) -> Settings:
    return choice(
        "advantage_estimator",
        _ESTIMATORS,
        "no such estimator here; use --custom-advantage-function-path (docs/actor.md)",
    )(it)


def _divides(it: Given) -> Settings:
    if it.look("algorithm.adv_estimator") not in ("grpo", "grpo_vectorized"):
        raise Needless("of grpo alone")
    return {"disable_grpo_std_normalization": not it.value}


def _discount(setting: str) -> Row:
    def convert(it: Given) -> Settings:
        if it.look("algorithm.adv_estimator") not in ("gae", "reinforce_plus_plus"):
            raise Needless("of gae and reinforce_plus_plus alone")
        return {setting: it.number()}

    key = {"gamma": "algorithm.gamma", "lambd": "algorithm.lam"}[setting]
    return row(key, setting, convert, default=1.0)


def _kl_coef(it: Given) -> Settings:
    if not same(it.look("algorithm.use_kl_in_reward"), True):
        raise Needless("use_kl_in_reward is off")
    return {"kl_coef": it.number()}


def _kl_penalty(it: Given) -> Settings:
    if not same(it.look("algorithm.use_kl_in_reward"), True):
        raise Needless("use_kl_in_reward is off")
    return choice("kl_loss_type", _KL_IN_REWARD, "use --kl-loss-type k1, k2 or low_var_kl")(it)


def _filter(it: Given) -> Settings:
    if not same(it.value, True):
        raise Needless("off, as here")
    return {"dynamic_sampling_filter_path": FILTER}


def _importance(it: Given) -> Settings:
    if same(it.look("algorithm.rollout_correction.bypass_mode"), True):
        raise Needless("bypass_mode compares with the engines' log-probs, so there is no weight")
    if it.value is None:
        return {"use_tis": False}
    if it.value not in ("token", "sequence"):
        raise NotHere("use --tis-level token, sequence or geometric")
    return {"use_tis": True, "tis_level": it.value}


def _threshold(it: Given) -> Settings:
    is_bypassed = same(it.look("algorithm.rollout_correction.bypass_mode"), True)
    if it.look("algorithm.rollout_correction.rollout_is") is None or is_bypassed:
        raise Needless("rollout_is is off")
    if isinstance(it.value, str) and "_" in it.value:
        low, _, high = it.value.partition("_")
        try:
            return {"tis_clip_low": float(low), "tis_clip": float(high)}
        except ValueError:
            raise NotHere("use --tis-clip-low and --tis-clip") from None
    return {"tis_clip": it.number()}


def _overlong(setting: str) -> Row:
    name = {"overlong_buffer_len": "len", "overlong_penalty": "penalty_factor"}[setting]
    base = "reward_kwargs.overlong_buffer_cfg"

    def convert(it: Given) -> Settings:
        manager = it.look("reward.reward_manager.name")
        if not same(it.look(f"reward.{base}.enable"), True) or manager != "dapo":
            raise Needless("the overlong buffer is off: it needs enable=True and the manager dapo")
        return {setting: it.number() if name != "len" else it.count()}

    return row(f"reward.{base}.{name} reward_model.{base}.{name} reward_model.overlong_buffer.{name}",
               setting, convert, note="with the reward manager dapo")


def _max_response(it: Given) -> Settings:
    if not same(it.value, it.look("data.max_response_length")):
        raise NotHere("the overlong buffer ends at --rollout-max-response-len")
    raise Needless("it is data.max_response_length, as here")


def _steps(it: Given) -> Settings:
    if it.value is None:
        raise Needless("total_epochs decides")
    return {"num_rollout": it.count()}


def _epochs(it: Given) -> Settings:
    if it.look("trainer.total_training_steps") is not None:
        raise Needless("total_training_steps decides")
    return {"num_epoch": it.count()}




def _saves(it: Given) -> Settings:
    if it.count() <= 0:
        raise Needless("a run always saves at its end and at a preemption")
    return {"save_interval": it.count()}


def _tests(it: Given) -> Settings:
    if it.count() <= 0:
        raise Needless("off, as here")
    return {"eval_interval": it.count()}


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
        raise NotHere("verl keeps all checkpoints, rlpost the last --keep-last; see --keep-every")
    return {"keep_last": it.count()}


_DATA = (
    row("data.train_files", "prompt_data", _prompts, note="Parquet as it is"),
    row("data.val_files", "eval_prompt_data", lambda it: eval_sets(it), note="with --eval-interval"),
    row("data.prompt_key", "input_key label_key apply_chat_template", _columns,
        note="the answer is in reward_model.ground_truth", default="prompt"),
    row("data.train_batch_size", "rollout_batch_size", note="prompts in both", default=1024),
    row("data.gen_batch_size", "over_sampling_batch_size", _oversampling, note="prompts in both"),
    row("data.max_prompt_length", "rollout_max_prompt_len", default=512),
    row("data.max_response_length", "rollout_max_response_len", default=512),
    needless("data.filter_overlong_prompts", "longer prompts are always skipped and counted", True,
             instead="verl fails at a longer prompt or cuts it; here it is skipped and counted"),
    needless("data.truncation", "longer prompts are skipped and counted", "error",
             instead="no prompt is cut: a longer one is skipped and counted"),
    row("data.shuffle", "rollout_shuffle", default=True),
    row("data.seed", "rollout_seed", lambda it: {"rollout_seed": it.count()}),
    row("data.apply_chat_template_kwargs.*", "apply_chat_template_kwargs", _template),
    lacking("data.train_max_samples data.val_max_samples",
            "select rows with PATH@[0:N] in --prompt-data or --eval-prompt-data", -1, None),
    lacking("data.tokenizer", "the tokenizer is that of --hf-checkpoint", None),
    lacking("data.custom_cls.* data.sampler.* data.datagen.*",
            "prompts come from JSON Lines or Parquet in order or shuffled (docs/data.md)", None),
    lacking("data.tool_config_path data.function_tool_path",
            "tools belong to an environment (docs/agents.md)", None),
    needless("data.image_key data.video_key data.audio_key data.image_patch_size "
             "data.return_multi_modal_inputs data.mm_processor_kwargs data.mm_processor_kwargs.*",
             "prompts are text: a column of pictures is not read"),
    needless("data.reward_fn_key", "the column is in prompt.metadata for --custom-rm-path"),
    needless("data.return_raw_chat data.return_raw_input_ids data.return_full_prompt "
             "data.dataloader_num_workers data.filter_overlong_prompts_workers data.use_shm "
             "data.trust_remote_code data.val_batch_size data.validation_shuffle "
             "data.prompt_dict_keys", "rlpost reads prompts in its own way"),
)
_ALGORITHM = (
    row("algorithm.adv_estimator", "advantage_estimator", _estimator, default="gae"),
    row("algorithm.norm_adv_by_std_in_grpo", "disable_grpo_std_normalization", _divides,
        note="inverted", default=True),
    _discount("gamma"),
    _discount("lambd"),
    row("algorithm.kl_ctrl.kl_coef", "kl_coef", _kl_coef, note="with use_kl_in_reward",
        default=0.001),
    row("algorithm.kl_penalty", "kl_loss_type", _kl_penalty, note="with use_kl_in_reward",
        default="kl"),
    needless("algorithm.use_kl_in_reward", "--kl-coef above 0 is the penalty in the reward",
             default=False),
    lacking("algorithm.kl_ctrl.type", "the coefficient of a KL penalty is fixed", "fixed"),
    needless("algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl", "of the adaptive coefficient"),
    row("algorithm.filter_groups.enable", "dynamic_sampling_filter_path",
        _filter),
    lacking("algorithm.filter_groups.metric",
            "groups are filtered by the trained reward; write another filter (docs/rollout.md)",
            None, "seq_reward", "seq_final_reward", "score"),
    lacking("algorithm.filter_groups.max_num_gen_batches algorithm.filter_groups.max_inflight_gen_batches",
            "generation goes on until a batch is full", 0),
    row("algorithm.rollout_correction.rollout_is", "use_tis tis_level", _importance),
    row("algorithm.rollout_correction.rollout_is_threshold", "tis_clip tis_clip_low", _threshold,
        default=2.0),
    row("algorithm.rollout_correction.bypass_mode", "use_rollout_logprobs", default=False),
    lacking("algorithm.rollout_correction.rollout_rs algorithm.rollout_correction.rollout_rs_threshold",
            "rejection has one setting here, --tis-mode mask or reject with --tis-level", None),
    lacking("algorithm.rollout_correction.loss_type", "use --loss-type custom_loss", "ppo_clip"),
    lacking("algorithm.rollout_correction.rollout_is_batch_normalize",
            "weights are not divided by their mean", False),
    lacking("algorithm.use_pf_ppo", "there is no reweighting of samples", False),
    needless("algorithm.pf_ppo.*", "of use_pf_ppo"),
)
_REWARD = (
    lacking("reward.custom_reward_function.path custom_reward_function.path", REWARD, default=None),
    needless("reward.custom_reward_function.name custom_reward_function.name",
             "goes with custom_reward_function.path"),
    lacking("reward.custom_reward_function.* custom_reward_function.*",
            "a reward reads its own settings (docs/rewards.md)"),
    lacking("reward.reward_manager.name reward_model.reward_manager",
            "use --custom-rm-path, with --group-rm for a whole group (docs/rewards.md)", "naive",
            "dapo", None, default="naive"),
    needless("reward.reward_kwargs.overlong_buffer_cfg.enable "
             "reward_model.reward_kwargs.overlong_buffer_cfg.enable reward_model.overlong_buffer.enable",
             "--overlong-buffer-len turns it on"),
    _overlong("overlong_buffer_len"),
    _overlong("overlong_penalty"),
    needless("reward.reward_kwargs.overlong_buffer_cfg.log "
             "reward_model.reward_kwargs.overlong_buffer_cfg.log reward_model.overlong_buffer.log",
             "metrics.jsonl has every metric"),
    row("reward.reward_kwargs.max_resp_len reward_model.reward_kwargs.max_resp_len", "",
        _max_response),
    lacking("reward.reward_model.enable reward_model.enable",
            "rewards of a model: --rm-type judge or remote_rm (docs/rewards.md)", False, None),
    needless("reward.reward_model.* reward_model.model.* reward_model.rollout.* "
             "reward_model.enable_resource_pool reward_model.n_gpus_per_node reward_model.nnodes "
             "reward_model.micro_batch_size_per_gpu", "of a reward model: see its key enable"),
    needless("reward.num_workers reward_model.num_workers reward_model.use_reward_loop "
             "reward_model.launch_reward_fn_async", "graders start on demand, --reward-workers"),
    lacking("reward.sandbox_fusion.url sandbox_fusion.url reward_model.sandbox_fusion.url",
            "code is graded in sandboxes of the run (docs/rewards.md)", None),
    needless("reward.sandbox_fusion.* sandbox_fusion.* reward_model.sandbox_fusion.*",
             "of Sandbox Fusion"),
    lacking("reward.reward_manager.* reward_model.reward_loop_*",
            "use --custom-rm-path (docs/rewards.md)", None, "register", "custom_reward_manager"),
    lacking("reward.reward_kwargs.* reward_model.reward_kwargs.* reward.* reward_model.*",
            "a reward reads its own settings (docs/rewards.md)", None),
)
_TRAINER = (
    row("trainer.total_training_steps", "num_rollout", _steps),
    row("trainer.total_epochs", "num_epoch", _epochs, default=30),
    row("trainer.save_freq", "save_interval", _saves, note="steps in both"),
    row("trainer.test_freq", "eval_interval", _tests, note="steps in both", default=-1),
    row("trainer.val_before_train", "skip_eval_before_train", _first_test, note="inverted",
        default=True),
    row("trainer.nnodes", "actor_num_nodes", _nodes, default=1),
    row("trainer.n_gpus_per_node", "num_gpus_per_node actor_num_gpus_per_node", _gpus, default=8),
    row("trainer.logger", "use_wandb use_tensorboard", _loggers, default=["console", "wandb"]),
    row("trainer.project_name", "wandb_project", _project, default="verl_examples"),
    row("trainer.experiment_name", "job_name", job_name),
    row("trainer.default_local_dir", "save", lambda it: {"save": text(it)},
        note="without it RUN/checkpoints"),
    row("trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep", "keep_last", _kept),
    row("trainer.balance_batch", "balance_data", default=True),
    row("trainer.critic_warmup", "num_critic_only_steps",
        when("algorithm.adv_estimator", "gae", "without gae there is no critic",
             lambda it: {"num_critic_only_steps": max(0, it.count() - 1)}),
        note="verl's N is N - 1 steps"),
    needless("trainer.resume_mode", "a requeued run resumes by itself", "auto",
             instead="--resume or a new run folder decides; --load gives other checkpoints"),
    lacking("trainer.resume_from_path", "use --load, with checkpoints of rlpost", None),
    lacking("trainer.val_only", "use rlpost evaluate", False),
    lacking("trainer.device", "GPUs are NVIDIA's", "cuda"),
    needless("trainer.log_val_generations trainer.rollout_data_dir trainer.validation_data_dir",
             "the run's page has answers, RUN/report"),
    lacking("trainer.default_hdfs_dir", "checkpoints are on a shared file system", None),
    needless("trainer.esi_redundant_time", "the end of a job's time is known (docs/preemption.md)"),
    needless("trainer.del_local_ckpt_after_load trainer.ray_wait_register_center_timeout "
             "trainer.use_legacy_worker_impl trainer.use_v1", "of verl's own workers"),
    lacking("trainer.v1.trainer_mode", "use --rollout-mode one_step_off or fully_async with "
            "--max-staleness (docs/rollout.md), and split GPUs without --colocate", "sync"),
    needless("trainer.v1.*", "of the asynchronous modes: see trainer.v1.trainer_mode"),
    lacking("async_training.staleness_threshold", "a share of stale samples there; --max-staleness "
            "counts weight versions (docs/rollout.md)", 0),
    lacking("async_training.*", "use --rollout-mode fully_async (docs/rollout.md)"),
    lacking("distillation.enabled", "use --use-opd (docs/distillation.md)", False),
    needless("distillation.*", "of distillation: see distillation.enabled"),
    needless("ray_kwargs.*", "agents of the job start Ray (docs/bringup.md)"),
    needless("global_profiler.* *.profiler.*", "use --profile or --trace-steps (docs/seeing.md)"),
    needless("transfer_queue.* skip.* hydra.* model_engine *._target_", "of verl's own programs"),
)
VERL = Stack("verl", (*_DATA, *_ALGORITHM, *_REWARD, *_TRAINER, *WORKERS))
"""The rows of verl."""
