"""Keys of NeMo-RL's GRPO: algorithm, data, logging and cluster. Pure data.

The keys are those of ``examples/configs/grpo_math_1B.yaml`` at 7ea279a (22 August 2026), the base of
its recipes. Those of ``policy``: ``nemo_rl_policy``.
"""

from __future__ import annotations

from rlpost.extensions.importing.peers.common import (
    eval_sets,
    filter_groups,
    interval,
    job_name,
    paths,
    switch,
    text,
)
from rlpost.extensions.importing.peers.nemo_rl_megatron import MEGATRON_ROWS
from rlpost.extensions.importing.peers.nemo_rl_policy import POLICY_ROWS
from rlpost.extensions.importing.peers.row import (
    Convert,
    Given,
    Needless,
    NotHere,
    Settings,
    Stack,
    as_count,
    lacking,
    needless,
    row,
    same,
    when,
)

ESTIMATOR = "grpo.adv_estimator."
PROMPTS, ANSWERS = "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt"
ASYNC = "grpo.async_grpo."
COLOCATED, RESOURCES = (
    "policy.generation.colocated.enabled",
    "policy.generation.colocated.resources.",
)
_NO_LIMIT = 1_000_000
"""Steps that NeMo-RL's recipes write where epochs decide."""
_REWARD = (
    "NeMo-RL's environments grade and here no reward is chosen; use --rm-type, or --custom-rm-path "
    "(docs/rewards.md)"
)
_OTHER_DEVIATION = (
    "it divides by the standard deviation of the other answers, so grpo is left; the same numbers: "
    "--custom-advantage-function-path (docs/migrating.md)"
)


def _steps(it: Given) -> Settings:
    if it.count() >= _NO_LIMIT:
        raise Needless("max_num_epochs decides")
    return {"num_rollout": it.count()}


def _epochs(it: Given) -> Settings:
    steps = it.look("grpo.max_num_steps")
    if isinstance(steps, int) and steps < _NO_LIMIT:
        raise NotHere(
            f"NeMo-RL ends after {it.count()} epochs or {steps} steps, whichever is first; here "
            f"--num-rollout {steps} alone decides, so give fewer where the epochs are shorter"
        )
    return {"num_epoch": it.count()}


def _estimator(it: Given) -> Settings:
    if it.value == "reinforce_plus_plus":
        has_baseline = not same(it.look(ESTIMATOR + "minus_baseline"), False)
        suffix = "_baseline" if has_baseline else ""
        return {"advantage_estimator": f"reinforce_plus_plus{suffix}"}
    if it.value != "grpo":
        raise NotHere(
            "use --advantage-estimator, or --custom-advantage-function-path (docs/actor.md)"
        )
    divides, leaves_out = (
        same(it.look(ESTIMATOR + name), True)
        for name in ("normalize_rewards", "use_leave_one_out_baseline")
    )
    if divides and leaves_out:
        raise NotHere(_OTHER_DEVIATION)
    if leaves_out:
        return {"advantage_estimator": "rloo"}
    return {"advantage_estimator": "grpo", "disable_grpo_std_normalization": not divides}


def _oversampling(it: Given) -> Settings:
    prompts = as_count(PROMPTS, it.look(PROMPTS))
    if it.number() <= 1:
        raise Needless("off, as here")
    return {"over_sampling_batch_size": int(prompts * it.number())}


def _shaping(convert: Convert) -> Convert:
    return when("grpo.reward_shaping.enabled", True, "reward_shaping is off", convert)


def _shaped_length(it: Given) -> Settings:
    if same(it.value, it.look("policy.generation.max_new_tokens")):
        raise Needless("it is the length at which generation ends, as here")
    raise NotHere("the overlong buffer ends at --rollout-max-response-len")


def _first_validation(it: Given) -> Settings:
    return {"skip_eval_before_train": not it.value}


def _mode(it: Given) -> Settings:
    return {"rollout_mode": "fully_async" if same(it.value, True) else "sync"}


def _asynchronous(convert: Convert) -> Convert:
    return when(ASYNC + "enabled", True, "async_grpo is off", convert)


def _in_flight(it: Given) -> Settings:
    if same(it.value, True):
        raise Needless("requests in flight go on after an update")
    raise NotHere("requests in flight go on after an update (docs/rollout.md)")


def _kl(it: Given) -> Settings:
    size = it.number()
    if not size:
        return {"use_kl_loss": False}
    if same(it.look("loss_fn.use_kl_in_reward"), True):
        return {"kl_coef": size}
    return {"use_kl_loss": True, "kl_loss_coef": size, "use_unbiased_kl": True}


def _kl_type(it: Given) -> Settings:
    if not it.look("loss_fn.reference_policy_kl_penalty"):
        raise Needless("there is no KL penalty")
    if it.value not in ("k1", "k2", "k3"):
        raise NotHere("use --kl-loss-type k1, k2 or k3")
    return {"kl_loss_type": it.value}


def _policy_loss(name: str) -> Convert:
    def convert(it: Given) -> Settings:
        if not same(it.value, True):
            raise Needless("off, as here")
        return {"policy_loss": name}

    return convert


def _dual_clip(it: Given) -> Settings:
    if it.value is None:
        raise Needless("off, as here")
    return {"eps_clip_c": it.number()}


IMPORTANCE = "loss_fn.use_importance_sampling_correction"
TRUNCATED = "loss_fn.truncated_importance_sampling_"
UNBOUNDED = 1e6
"""--tis-clip for weights that NeMo-RL does not bound."""


def _importance(it: Given) -> Settings:
    if not same(it.value, True):
        return {"use_tis": False}
    if it.look(TRUNCATED + "ratio") is None:
        return {"use_tis": True, "tis_clip": UNBOUNDED}
    return {"use_tis": True}


def _bound(setting: str) -> Convert:
    def convert(it: Given) -> Settings:
        if it.value is None or not same(it.look(IMPORTANCE), True):
            raise Needless("off, as here")
        return {setting: it.number()}

    return convert


def _bound_kind(it: Given) -> Settings:
    if it.value is None or not same(it.look(IMPORTANCE), True):
        raise Needless("off, as here")
    table = {"tis": "truncate", "icepop": "mask"}
    if str(it.value) not in table:
        raise NotHere("--tis-level and --tis-mode have one choice each (docs/migrating.md)")
    return {"tis_mode": table[str(it.value)]}


def _saves(it: Given) -> Settings:
    if same(it.look("checkpointing.enabled"), False):
        raise Needless("checkpointing is off")
    return {"save_interval": it.count()}


def _folder(it: Given) -> Settings:
    if same(it.look("checkpointing.enabled"), False):
        raise Needless("checkpointing is off")
    return {"save": text(it)}


def _split(it: Given) -> tuple[int, int, int]:
    """Nodes of the trainer, its GPUs on each, and GPUs of the engines."""
    nodes = as_count("cluster.num_nodes", it.look("cluster.num_nodes"))
    gpus = as_count("cluster.gpus_per_node", it.look("cluster.gpus_per_node"))
    if not same(it.look(COLOCATED), False):
        return nodes, gpus, 0
    own_nodes, own_gpus = it.look(RESOURCES + "num_nodes"), it.look(RESOURCES + "gpus_per_node")
    if isinstance(own_nodes, int) and 0 < own_nodes < nodes:
        engines = own_gpus if isinstance(own_gpus, int) else gpus
        return nodes - own_nodes, gpus, own_nodes * engines
    if isinstance(own_gpus, int) and 0 < own_gpus < gpus and nodes == 1:
        return 1, gpus - own_gpus, own_gpus
    raise NotHere("use --actor-num-nodes, --actor-num-gpus-per-node and --rollout-num-gpus")


def _nodes(it: Given) -> Settings:
    return {"actor_num_nodes": _split(it)[0]}


def _gpus(it: Given) -> Settings:
    return {"num_gpus_per_node": it.count(), "actor_num_gpus_per_node": _split(it)[1]}


def _colocated(it: Given) -> Settings:
    if same(it.value, True):
        return {"colocate": True}
    return {"colocate": False, "rollout_num_gpus": _split(it)[2]}


def _wandb(convert: Convert) -> Convert:
    return when("logger.wandb_enabled", True, "W&B is off", convert)


def _segment(it: Given) -> Settings:
    if it.value is None:
        raise Needless("off, as here")
    return {"segment": it.count()}


_GRPO = (
    row(PROMPTS, "rollout_batch_size", note="prompts in both", default=32),
    row(ANSWERS, "n_samples_per_prompt", default=16),
    row("grpo.max_num_steps", "num_rollout", _steps, default=_NO_LIMIT),
    row("grpo.max_num_epochs", "num_epoch", _epochs, default=1),
    row(
        ESTIMATOR + "name",
        "advantage_estimator disable_grpo_std_normalization",
        _estimator,
        note="with normalize_rewards and use_leave_one_out_baseline",
        default="grpo",
    ),
    needless(
        ESTIMATOR + "normalize_rewards grpo.normalize_rewards",
        "see adv_estimator.name",
        default=True,
    ),
    needless(
        ESTIMATOR + "use_leave_one_out_baseline grpo.use_leave_one_out_baseline",
        "see adv_estimator.name",
        default=True,
    ),
    needless(ESTIMATOR + "minus_baseline", "of reinforce_plus_plus: see adv_estimator.name"),
    row(
        "grpo.val_period",
        "eval_interval",
        interval("eval_interval"),
        note="steps in both",
        default=10,
    ),
    row(
        "grpo.val_at_start",
        "skip_eval_before_train",
        _first_validation,
        note="inverted",
        default=False,
    ),
    lacking("grpo.val_at_end", "use rlpost evaluate on the last checkpoint", False),
    lacking("grpo.val_start_at", "evaluation starts with the run", -1),
    lacking("grpo.max_val_samples", "select rows with PATH@[0:N] in --eval-prompt-data", None),
    row("grpo.val_num_generations_per_prompt", "n_samples_per_eval_prompt", default=1),
    lacking(
        "grpo.stop_at_validation_metric grpo.stop_at_validation_threshold",
        "a run trains --num-rollout steps",
        None,
    ),
    row("grpo.seed", "rollout_seed"),
    row("grpo.use_dynamic_sampling", "dynamic_sampling_filter_path", filter_groups),
    needless("grpo.dynamic_sampling_max_gen_batches", "generation goes on until a batch is full"),
    row(
        "grpo.batch_multiplier",
        "over_sampling_batch_size",
        _oversampling,
        note="times num_prompts_per_step",
    ),
    row(
        "grpo.overlong_filtering",
        "truncated_answers",
        switch({"truncated_answers": "mask"}),
        note="masked answers count in the denominator here",
    ),
    lacking(
        "grpo.advantage_clip_low grpo.advantage_clip_high",
        "use --custom-advantage-function-path",
        None,
    ),
    needless("grpo.reward_shaping.enabled", "--overlong-buffer-len turns it on"),
    row(
        "grpo.reward_shaping.overlong_buffer_length",
        "overlong_buffer_len",
        _shaping(lambda it: {"overlong_buffer_len": it.count()}),
    ),
    row(
        "grpo.reward_shaping.overlong_buffer_penalty",
        "overlong_penalty",
        _shaping(lambda it: {"overlong_penalty": it.number()}),
    ),
    row("grpo.reward_shaping.max_response_length", "", _shaping(_shaped_length)),
    lacking("grpo.reward_shaping.*", "use --custom-rm-path, or --truncated-answers punish", None),
    lacking("grpo.reward_scaling.enabled", "scale in the reward function (docs/rewards.md)", False),
    needless("grpo.reward_scaling.*", "of reward_scaling"),
    lacking("grpo.max_rollout_turns", "write an environment (docs/agents.md)", 1),
    row(ASYNC + "enabled", "rollout_mode", _mode),
    row(
        ASYNC + "max_trajectory_age_steps",
        "max_staleness",
        _asynchronous(lambda it: {"max_staleness": it.count()}),
        note="weight versions",
    ),
    row(ASYNC + "in_flight_weight_updates", "", _asynchronous(_in_flight)),
    lacking(ASYNC + "recompute_kv_cache_after_weight_updates", "see docs/rollout.md", False),
    needless("grpo.async_grpo", "off, as here", None),
    lacking("async_rl.*", "use --rollout-mode fully_async with --max-staleness (docs/rollout.md)"),
    needless(ASYNC + "*", "failed requests are tried again (docs/engines.md)"),
    lacking(
        "grpo.seq_logprob_error_threshold grpo.invalid_tool_call_advantage "
        "grpo.malformed_thinking_advantage",
        "use --use-tis, or --custom-advantage-function-path",
        None,
    ),
    needless("grpo.val_batch_size", "all prompts of an evaluation are in flight"),
)
_LOSS = (
    row(
        "loss_fn.reference_policy_kl_penalty",
        "use_kl_loss kl_loss_coef use_unbiased_kl kl_coef",
        _kl,
        default=0.01,
    ),
    row("loss_fn.reference_policy_kl_type", "kl_loss_type", _kl_type, default="k3"),
    needless("loss_fn.use_kl_in_reward", "see reference_policy_kl_penalty"),
    lacking(
        "loss_fn.kl_input_clamp_value loss_fn.kl_output_clamp_value",
        "--kl-loss-type low_var_kl bounds its estimate by 10, k3 has no bound",
        None,
    ),
    row("loss_fn.ratio_clip_min", "eps_clip", default=0.2),
    row("loss_fn.ratio_clip_max", "eps_clip_high", default=0.2),
    row("loss_fn.ratio_clip_c", "eps_clip_c", _dual_clip),
    lacking(
        "loss_fn.use_on_policy_kl_approximation",
        "--use-unbiased-kl weighs by policy / old policy (docs/migrating.md)",
        False,
    ),
    row(
        IMPORTANCE,
        "use_tis tis_clip",
        _importance,
        note="without a bound --tis-clip 1000000",
        default=False,
    ),
    row(TRUNCATED + "type", "tis_mode", _bound_kind, note="tis, icepop"),
    row(TRUNCATED + "ratio", "tis_clip", _bound("tis_clip")),
    row(TRUNCATED + "ratio_min", "tis_clip_low", _bound("tis_clip_low")),
    row("loss_fn.sequence_level_importance_ratios", "policy_loss", _policy_loss("gspo")),
    row("loss_fn.use_cispo", "policy_loss", _policy_loss("cispo")),
    row("loss_fn.token_level_loss", "calculate_per_token_loss", default=True),
    lacking("loss_fn.force_on_policy_ratio", "use --num-steps-per-rollout 1", False),
    lacking(
        "loss_fn.disable_ppo_ratio loss_fn.positive_example_nll_weight",
        "use --loss-type custom_loss",
        False,
        0.0,
    ),
)
_DATA = (
    row("data.train.data_path", "prompt_data", lambda it: {"prompt_data": paths(it)}),
    row("data.train.input_key data.default.input_key", "input_key"),
    row("data.train.output_key data.default.output_key", "label_key"),
    row("data.validation.data_path", "eval_prompt_data", eval_sets, note="with --eval-interval"),
    row("data.validation.input_key", "eval_input_key"),
    row("data.validation.output_key", "eval_label_key"),
    lacking(
        "data.train.dataset_name data.validation.dataset_name data.default.dataset_name",
        "NeMo-RL loads the set by name; write it as JSON Lines and give --prompt-data or "
        "--eval-prompt-data (docs/data.md)",
        None,
        "ResponseDataset",
    ),
    lacking(
        "data.train.split_validation_size", "select rows with PATH@[A:B] (docs/data.md)", None, 0
    ),
    lacking(
        "data.default.prompt_file data.train.prompt_file data.validation.prompt_file "
        "data.default.system_prompt_file data.train.system_prompt_file "
        "data.validation.system_prompt_file",
        "write the text into the prompts, as messages with --apply-chat-template",
        None,
    ),
    lacking(
        "data.default.env_name data.train.env_name data.validation.env_name",
        _REWARD,
        default="math",
    ),
    needless(
        "data.default.processor data.train.processor data.validation.processor data.train.seed "
        "data.train.subset data.train.split data.validation.subset data.validation.split "
        "data.num_workers",
        "rlpost reads prompts in its own way",
    ),
    lacking("data.validation.repeat", "use --n-samples-per-eval-prompt", None, 1),
    row("data.shuffle", "rollout_shuffle", default=True),
    row("data.max_input_seq_length", "rollout_max_prompt_len"),
    lacking(
        "data.use_multiple_dataloader",
        "several files: --prompt-data with --prompt-data-weights",
        False,
    ),
    lacking(
        "data.train data.validation data.default",
        "give files with --prompt-data (docs/data.md)",
        None,
    ),
    needless("env.*", "see data.default.env_name"),
    lacking("reward_penalties.*", "use --custom-rm-path (docs/rewards.md)", False, None),
    lacking(
        "on_policy_distillation on_policy_distillation.*",
        "use --use-opd (docs/distillation.md)",
        None,
    ),
    lacking(
        "sft.* dpo.* rm.* ppo.* distillation.*",
        "rows are those of GRPO; SFT is --loss-type sft_loss (docs/data.md)",
    ),
)
_RUN = (
    needless(
        "checkpointing.enabled",
        "on, as here",
        True,
        instead="a run always saves at its end and at a preemption",
    ),
    row("checkpointing.checkpoint_dir", "save", _folder, note="without it RUN/checkpoints"),
    row("checkpointing.save_period", "save_interval", _saves, note="steps in both", default=10),
    lacking("checkpointing.keep_top_k", "the newest are kept, --keep-last and --keep-every", None),
    needless("checkpointing.metric_name checkpointing.higher_is_better", "of keep_top_k"),
    needless("checkpointing.checkpoint_must_save_by", "Slurm's own signal (docs/preemption.md)"),
    row(
        "checkpointing.save_optimizer",
        "no_save_optim",
        lambda it: {"no_save_optim": not it.value},
        note="inverted",
    ),
    needless("checkpointing.*", "rlpost writes torch_dist checkpoints, and --save-hf exports"),
    row(
        "cluster.num_nodes",
        "actor_num_nodes",
        _nodes,
        note="those of engines not counted",
        default=1,
    ),
    row("cluster.gpus_per_node", "num_gpus_per_node actor_num_gpus_per_node", _gpus, default=1),
    row(COLOCATED, "colocate rollout_num_gpus", _colocated, default=True),
    needless(RESOURCES + "*", "see colocated.enabled", default=None),
    row("cluster.segment_size", "segment", _segment),
    needless("cluster.*", "ports follow from the job's id (docs/bringup.md)"),
    row("logger.wandb_enabled", "use_wandb"),
    row("logger.wandb.project", "wandb_project", _wandb(lambda it: {"wandb_project": text(it)})),
    row("logger.wandb.name", "job_name", job_name),
    row("logger.tensorboard_enabled", "use_tensorboard"),
    lacking(
        "logger.mlflow_enabled logger.swanlab_enabled",
        "use --use-wandb or --use-tensorboard",
        False,
    ),
    needless("logger.*", "metrics.jsonl and the run's page have all metrics (docs/seeing.md)"),
    lacking("data_plane.enabled", "batches go through Ray's object store", False),
    needless("data_plane.*", "of data_plane"),
)
NEMO_RL = Stack("NeMo-RL", (*_GRPO, *_LOSS, *_DATA, *_RUN, *POLICY_ROWS, *MEGATRON_ROWS))
"""The rows of NeMo-RL."""
