"""Keys of verl's data and algorithm. Pure data."""

from __future__ import annotations

from rlpost.extensions.importing.peers.common import eval_sets, filter_groups, paths, text
from rlpost.extensions.importing.peers.row import (
    Given,
    Needless,
    NotHere,
    Row,
    Settings,
    choice,
    lacking,
    needless,
    row,
    same,
)
from rlpost.extensions.importing.peers.verl_keys import IMAGES

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


def _prompts(it: Given) -> Settings:
    return {"prompt_data": paths(it)}


def _columns(it: Given) -> Settings:
    # The layout of verl's Parquet files: messages, and the answer below reward_model.
    return {
        "input_key": text(it),
        "label_key": "reward_model.ground_truth",
        "apply_chat_template": True,
    }


def _whole_template(it: Given) -> Settings:
    if not it.value:
        raise Needless("none, as here")
    return {"apply_chat_template_kwargs": it.value}


def _template(it: Given) -> Settings:
    return {"apply_chat_template_kwargs": {it.tail: it.value}}


def _oversampling(it: Given) -> Settings:
    if it.value is None:
        raise Needless("off, as here")
    return {"over_sampling_batch_size": it.count()}


def _estimator(it: Given) -> Settings:
    own = choice(
        "advantage_estimator",
        _ESTIMATORS,
        "no such estimator here; use --custom-advantage-function-path (docs/actor.md)",
    )(it)
    # verl whitens those of GAE whatever the settings are (core_algos.compute_gae_advantage_return).
    return own | {"normalize_advantages": True} if it.value == "gae" else own


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


_DATA = (
    row("data.train_files", "prompt_data", _prompts, note="Parquet as it is"),
    row(
        "data.val_files", "eval_prompt_data", lambda it: eval_sets(it), note="with --eval-interval"
    ),
    row(
        "data.prompt_key",
        "input_key label_key apply_chat_template",
        _columns,
        note="the answer is in reward_model.ground_truth",
        default="prompt",
    ),
    row("data.train_batch_size", "rollout_batch_size", note="prompts in both", default=1024),
    row("data.gen_batch_size", "over_sampling_batch_size", _oversampling, note="prompts in both"),
    row("data.max_prompt_length", "rollout_max_prompt_len", default=512),
    row("data.max_response_length", "rollout_max_response_len", default=512),
    needless(
        "data.filter_overlong_prompts",
        "longer prompts are always skipped and counted",
        True,
        instead="verl fails at a longer prompt or cuts it; here it is skipped and counted",
    ),
    needless(
        "data.truncation",
        "longer prompts are skipped and counted",
        "error",
        instead="no prompt is cut: a longer one is skipped and counted",
    ),
    row("data.shuffle", "rollout_shuffle", default=True),
    row("data.seed", "rollout_seed", lambda it: {"rollout_seed": it.count()}),
    row("data.apply_chat_template_kwargs", "apply_chat_template_kwargs", _whole_template),
    row("data.apply_chat_template_kwargs.*", "apply_chat_template_kwargs", _template),
    lacking(
        "data.train_max_samples data.val_max_samples",
        "select rows with PATH@[0:N] in --prompt-data or --eval-prompt-data",
        -1,
        None,
    ),
    lacking("data.tokenizer", "the tokenizer is that of --hf-checkpoint", None),
    lacking(
        "data.custom_cls.* data.sampler.* data.datagen.*",
        "prompts come from JSON Lines or Parquet in order or shuffled (docs/data.md)",
        None,
    ),
    lacking(
        "data.tool_config_path data.function_tool_path",
        "tools belong to an environment (docs/agents.md)",
        None,
    ),
    row(
        IMAGES,
        "multimodal_keys",
        lambda it: {"multimodal_keys": {"image": text(it)}},
        note="images of the marks <image>, for a model with an encoder of images",
    ),
    needless(
        "data.video_key data.audio_key",
        "prompts have text and images alone",
        "videos",
        "audios",
        None,
        instead="prompts have text and images alone (docs/data.md)",
    ),
    lacking(
        "data.mm_processor_kwargs data.mm_processor_kwargs.*",
        "images are prepared as the model's folder says; their size: --image-max-pixels",
        None,
        {},
    ),
    needless(
        "data.image_patch_size data.return_multi_modal_inputs",
        "the model's folder says how images are prepared",
    ),
    needless("data.reward_fn_key", "the column is in prompt.metadata for --custom-rm-path"),
    needless(
        "data.return_raw_chat data.return_raw_input_ids data.return_full_prompt "
        "data.dataloader_num_workers data.filter_overlong_prompts_workers data.use_shm "
        "data.trust_remote_code data.val_batch_size data.validation_shuffle "
        "data.prompt_dict_keys",
        "rlpost reads prompts in its own way",
    ),
)


_ALGORITHM = (
    row(
        "algorithm.adv_estimator",
        "advantage_estimator normalize_advantages",
        _estimator,
        note="gae whitens",
        default="gae",
    ),
    row(
        "algorithm.norm_adv_by_std_in_grpo",
        "disable_grpo_std_normalization",
        _divides,
        note="inverted",
        default=True,
    ),
    _discount("gamma"),
    _discount("lambd"),
    row(
        "algorithm.kl_ctrl.kl_coef",
        "kl_coef",
        _kl_coef,
        note="with use_kl_in_reward",
        default=0.001,
    ),
    row(
        "algorithm.kl_penalty",
        "kl_loss_type",
        _kl_penalty,
        note="with use_kl_in_reward",
        default="kl",
    ),
    needless(
        "algorithm.use_kl_in_reward",
        "--kl-coef above 0 is the penalty in the reward",
        default=False,
    ),
    lacking("algorithm.kl_ctrl.type", "the coefficient of a KL penalty is fixed", "fixed"),
    needless(
        "algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl", "of the adaptive coefficient"
    ),
    row("algorithm.filter_groups.enable", "dynamic_sampling_filter_path", filter_groups),
    lacking(
        "algorithm.filter_groups.metric",
        "groups are filtered by the trained reward; write another filter (docs/rollout.md)",
        None,
        "seq_reward",
        "seq_final_reward",
        "score",
    ),
    lacking(
        "algorithm.filter_groups.max_num_gen_batches algorithm.filter_groups.max_inflight_gen_batches",
        "generation goes on until a batch is full",
        0,
    ),
    row("algorithm.rollout_correction.rollout_is", "use_tis tis_level", _importance),
    row(
        "algorithm.rollout_correction.rollout_is_threshold",
        "tis_clip tis_clip_low",
        _threshold,
        default=2.0,
    ),
    row("algorithm.rollout_correction.bypass_mode", "use_rollout_logprobs", default=False),
    lacking(
        "algorithm.rollout_correction.rollout_rs algorithm.rollout_correction.rollout_rs_threshold",
        "rejection has one setting here, --tis-mode mask or reject with --tis-level",
        None,
    ),
    lacking("algorithm.rollout_correction.loss_type", "use --loss-type custom_loss", "ppo_clip"),
    lacking(
        "algorithm.rollout_correction.rollout_is_batch_normalize",
        "weights are not divided by their mean",
        False,
    ),
    lacking(
        "algorithm.gdpo_reward_keys", "several rewards: --reward-weights (docs/rewards.md)", None
    ),
    lacking("algorithm.use_pf_ppo", "there is no reweighting of samples", False),
    needless("algorithm.pf_ppo.*", "of use_pf_ppo"),
)


DATA_ROWS = (*_DATA, *_ALGORITHM)
