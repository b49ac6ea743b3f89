"""Every setting acts, or the check says that it does not.

Each setting of some tables is turned away from its default. Then something that the code of a run
computes from the settings changes (``PROBES``), or a line of the check names its flag. A setting that
acts only with another one has a row in ``no_effect.ROWS``: with that other setting the check is
silent about it, and it acts.
"""

from __future__ import annotations

import asyncio
import functools
import json
import typing
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import rlpost.trainer  # noqa: F401  its stand-in for CUDA comes before Megatron
from rlpost.algorithm.gae import Discounts, estimate_with_values
from rlpost.algorithm.guards import Guards
from rlpost.algorithm.objective import loss_function
from rlpost.algorithm.plugin import foreign_adapters
from rlpost.algorithm.shaping import shaped
from rlpost.cli import check_settings
from rlpost.columns import FloatColumn
from rlpost.config.checks.no_effect import ROWS, no_effect_notes, no_effect_problems
from rlpost.config.engine_args import engine_args
from rlpost.config.flags import fields, flag
from rlpost.config.groups.base import Group
from rlpost.config.groups.grpo import GrpoConfig
from rlpost.config.groups.rollout import RolloutConfig
from rlpost.config.plugin_settings import settings_of
from rlpost.config.tree import Config, Tree
from rlpost.config.wording import value_of, with_values
from rlpost.driver.batches import deal, rollout_advantages, samples_with, shaping_of
from rlpost.driver.training import guard_bounds, kl_penalties, masked_penalties
from rlpost.errors import ConfigError, DataError, TrainingError
from rlpost.rollout.filters import (
    buffer_filter,
    generate_function,
    group_filter,
    reward_post_process,
)
from rlpost.rollout.sampling import rollout_sampling
from rlpost.tasks.cursor import PromptCursor
from rlpost.tasks.prompt_settings import longest_prompt, prompt_fields
from rlpost.tasks.prompts import PromptSet
from rlpost.tasks.reward.grader import InlineGrader
from rlpost.tasks.reward.registry import reward_function
from rlpost.tasks.reward.worker import scorer
from rlpost.tasks.tokenizer import PromptTokenizer
from rlpost.trainer import optimizer
from rlpost.trainer.lora.adapters import peft_settings
from rlpost.trainer.muon import MuonSettings
from rlpost.trainer.step import Weighting
from rlpost.types import Prompt, Sample, SampleGroup, ScoredSample, Unfinished
from tests.unit.algorithm.test_objective import tokens_of
from tests.unit.tasks.test_tokenizer import TEMPLATE

TABLES = ("grpo", "rollout", "optimizer", "lora", "env")
PLUGIN = """
from rlpost.algorithm.objective import policy_objective

def loss(tokens, settings):
    loss_T, stats = policy_objective(tokens, settings)
    return 2.0 * loss_T, stats

def advantages(groups, penalties):
    return [[2.0 * scored.reward for scored in group.samples] for group in groups]

def reward(prompt, sample):
    return {"score": 0.25, "extra": 1.0}

def rewards(prompt, samples):
    return [0.125] * len(samples)

def keep(group):
    return False

def last(waiting, num_groups):
    return waiting[-num_groups:]

async def write(builder, prompt, sampling):
    return builder.sample()

def post_process(args, samples):
    return [0.0] * len(samples), [each.reward ** 2 for each in samples]
"""

OF_PROCESSES = {
    "rm_url": "the server of --rm-type remote_rm, which a prompt's metadata may name as well",
    "rm_url_timeout_s": "seconds of a request to it",
    "judge": "the file of --rm-type judge, which a prompt's metadata may name as well",
    "judge_url": "the server of that judge",
    "judge_engines": "the engines of that judge",
    "judge_model": "its name in requests",
    "judge_timeout_s": "seconds of a request to it",
    "reward_timeout_s": "seconds of a grading",
    "reward_workers": "number of processes",
    "rollout_mode": "the order of generation and training: tests/unit/driver/test_loop.py",
    "update_weights_interval": "steps between weight updates: tests/unit/driver/test_loop.py",
    "over_sampling_batch_size": "requests in flight: tests/unit/rollout/test_buffer.py",
    "max_staleness": "requests in flight: tests/unit/rollout/test_collector.py",
    "mask_offpolicy_in_partial_rollout": "masks resumed responses: tests/unit/rollout/test_buffer.py",
    "partial_rollout_record_s": "seconds between records in the journal",
    "num_rollout": "the length of a run: tests/unit/driver/test_loop.py",
    "rollout_function_path": "refused, or another setting: tests/unit/config/test_check_functions.py",
    "num_epoch": "becomes --num-rollout on the login node: tests/unit/cli/test_epochs.py",
    "log_probs_chunk_size": "memory of a pass; log-probs are equal",
    "enable_mtp_training": "a layer that few models have: tests/contract/test_mtp.py",
    "mtp_loss_scaling_factor": "the same",
    "use_routing_replay": "routers of experts: tests/contract/test_routing_replay.py",
    "use_rollout_sampling_mask": "log-probs over sets of tokens: tests/contract/test_sampling_mask.py",
    "disable_compute_advantages_and_returns": "without effect with --loss-type sft_loss by its meaning: "
    "supervised command lines of slime have it",
    "optimizer_cpu_offload": "needs CUDA; its help says so",
    "optimizer_offload_fraction": "needs CUDA: tests/contract/test_actor_optimizer.py",
    "overlap_cpu_optimizer_d2h_h2d": "needs CUDA",
    "use_precision_aware_optimizer": "needs CUDA and TransformerEngine; its help says so",
    "main_grads_dtype": "the same", "main_params_dtype": "the same",
    "exp_avg_dtype": "the same", "exp_avg_sq_dtype": "the same",
    "only_train_params_name_list": "names of a model: tests/contract/test_frozen.py",
    "freeze_params_name_list": "names of a model: tests/contract/test_frozen.py",
    "vision_tower": "gradients of an encoder: tests/contract/test_images_in_trainer.py",
    "image_max_pixels": "tokens of an image: tests/unit/images/test_processor.py",
    "seed": "random numbers of new weights and of dropout",
    "lora_export": "the form of a folder: tests/contract/test_lora.py",
    "env": "an environment's own code: tests/unit/agents",
    **dict.fromkeys(
        (
            "env_weights", "env_key", "env_args", "env_reward", "env_max_turns", "env_limit_reward",
            "env_train_side_requests", "env_timeout_s", "env_concurrency", "env_retries", "env_traces",
        ),
        "episodes: tests/unit/agents",
    ),
}  # fmt: skip
"""Settings whose effect no probe sees, and why."""
CONDITIONAL = {key for row in ROWS if not row.acts(Config()) for key in row.keys}
UNSEEN = {"bad_prompts", *OF_PROCESSES} - CONDITIONAL
"""Those that may act in a run as ``base_of``; bad_prompts acts on invalid rows."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a chat template, prompt files and functions."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("settings")
    vocab = {letter: i for i, letter in enumerate("?abcdefghijklmnopqrstuvwxyz[]>")}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="?"))
    core.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="?", chat_template=TEMPLATE + "{{ mood }}{{ tools }}"
    ).save_pretrained(path)
    rows = [
        {
            "input": "a" * (1 + number), "question": "b", "label": str(number), "answer": "c",
            "about": {"level": number}, "tools": [{"name": "add"}],
        }
        for number in range(6)
    ]  # fmt: skip
    lines = [json.dumps(row) + "\n" for row in rows]
    (path / "prompts.jsonl").write_text("".join(lines))
    (path / "more.jsonl").write_text("".join(lines[:2]))
    (path / "bad.jsonl").write_text("".join([*lines, "no JSON\n"]))
    (path / "mine.py").write_text(PLUGIN)
    return path


def base_of(folder: Path) -> Config:
    """A run of two optimizer steps per rollout, in which most settings can act."""
    return with_values(
        Config(),
        hf_checkpoint=str(folder),
        prompt_data=(str(folder / "prompts.jsonl"),),
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        num_steps_per_rollout=2,
        num_rollout=4,
        bf16=True,
        num_gpus_per_node=2,
        actor_num_gpus_per_node=1,
        rollout_num_gpus=1,
    )


# What a run computes from its settings


def properties(config: Config) -> dict[str, object]:
    """Derived values of the tree and of its tables."""
    owners: list[tuple[type[Group], Group]] = [
        (Tree, config),
        (RolloutConfig, config.rollout),
        (GrpoConfig, config.grpo),
    ]
    excluded = ("loss_settings", "lr_decay_iters", "tables")
    return {
        name: getattr(owner, name)
        for kind, owner in owners
        for name, member in vars(kind).items()
        if isinstance(member, property) and name not in excluded
    }


def loss(config: Config) -> object:
    """Loss, metrics and gradients of four samples."""
    whole = tokens_of(range(4), requires_grad=True)
    entropy = whole.entropy.clone().requires_grad_()
    has_old = config.num_steps_per_rollout > 1 or config.grpo.keep_old_actor
    assert whole.ref_logprobs is not None
    # at some tokens far enough for the bound of low_var_kl
    reference = whole.ref_logprobs + torch.linspace(0.0, 3.5, len(entropy))
    tokens = replace(
        whole,
        entropy=entropy,
        ref_logprobs=reference if config.grpo.use_kl_loss else None,
        old_logprobs=whole.old_logprobs if has_old else whole.logprobs.detach(),
    )
    settings = config.loss_settings
    loss_T, stats = loss_function(settings)(tokens, settings)
    weighting = Weighting(4, int(tokens.loss_mask.sum()), config.grpo.calculate_per_token_loss)
    packed = SimpleNamespace(
        loss_mask=tokens.loss_mask, sample_lengths=tokens.sample_lengths, sample_weights=1.0
    )
    total, _, terms = weighting.reduced(loss_T, stats, packed)
    total.backward()
    gradients = [tokens.logprobs.grad, entropy.grad]
    return total.item(), {name: term.item() for name, term in terms.items()}, gradients


LENGTHS = (3, 5, 8, 2)


def groups_of(config: Config) -> list[SampleGroup]:
    """Two groups: answers that are truncated, repetitive, or have several samples."""
    has_several = config.rollout.custom_generate_function_path is not None
    found = []
    for prompt_id, rewards in enumerate(((1.0, 0.0, 0.5, 0.25), (0.0, 1.0, 1.0, 0.75))):
        samples = []
        for index, (length, reward) in enumerate(zip(LENGTHS, rewards, strict=True)):
            sample = Sample(
                prompt_id, max(index - 1, 0) if has_several else index, (1, 2), range(length),
                [-0.5 - 0.1 * position for position in range(length)],
                "loop " * 2000 if index == 3 else "prose",
                "length" if index == 2 else "stop", 0,
            )  # fmt: skip
            samples.append(ScoredSample(sample, reward))
        found.append(SampleGroup(prompt_id, tuple(samples)))
    return found


def advantages(config: Config) -> object:
    """Advantages of a rollout, and its batches by optimizer step, as the driver makes them."""
    grpo = config.grpo
    groups = shaped(groups_of(config), replace(shaping_of(config), max_response_len=8))
    if (
        post_process := reward_post_process(
            config.grpo.custom_reward_post_process_path,
            foreign_adapters().arguments(settings_of(config)),
        )
    ) is not None:
        groups = list(post_process(groups).groups)
    penalties = None
    samples = samples_with([[0.0] * len(each.samples) for each in groups], groups, grpo)
    ours = [FloatColumn([-1.0 - 0.3 * number] * 8)[: each.response_length]
            for number, each in enumerate(samples)]  # fmt: skip
    reference = [FloatColumn(len(own) * [2.0]) for own in ours]  # beyond the bound of low_var_kl
    if grpo.kl_coef:
        penalties = masked_penalties(groups, kl_penalties(ours, reference, grpo))
    if config.use_critic:
        estimates = estimate_with_values(
            groups,
            [ours[:4], ours[4:]],
            penalties,
            Discounts(grpo.gamma, grpo.lambd),
            normalize_advantages=grpo.normalize_advantages,
        )
        return estimates.advantages, estimates.returns
    of_groups = rollout_advantages(groups, grpo, penalties)
    steps = deal(samples_with(of_groups, groups, grpo), config)
    return of_groups, [step.batches for step in steps]


def guards(config: Config) -> object:
    """Warnings and errors of the guards."""
    found = Guards(guard_bounds(config.grpo), is_fresh=False)
    values = {"train/ppo_kl": 5e-4, "train/rollout_logprob_abs_diff": 0.06}
    try:
        return [
            found.after_step(values | {"train/grad_norm": norm}, is_first=True)
            for norm in (1.0, 1.0, 1.0, 1.0, 1.0, 6.0)
        ]
    except TrainingError as error:
        return str(error)


def schedule(config: Config) -> object:
    """Settings of the optimizer, and learning rate and weight decay at each step."""
    groups = [SimpleNamespace(param_groups=[{}]) for _ in range(12)]
    rates = [optimizer.apply_schedule(each, config, step) for step, each in enumerate(groups)]
    muon = MuonSettings.of(config) if config.optimizer.optimizer == "muon" else None
    fixed = asdict(replace(optimizer.optimizer_config(config), timers=None))
    return rates, [each.param_groups for each in groups], muon, fixed


def requests(config: Config) -> object:
    """Sampling parameters, server arguments, and the functions that generate and choose."""
    rollout, groups = config.rollout, groups_of(config)
    waiting = [Unfinished(Prompt(number, "", (1,))) for number in range(3)]
    generate = generate_function(rollout.custom_generate_function_path)
    return (
        rollout_sampling(rollout, [1]),
        engine_args(config),
        [group_filter(rollout.dynamic_sampling_filter_path)(group) for group in groups],
        buffer_filter(rollout.buffer_filter_path)(waiting, 1),
        None if generate is None else generate.__name__,
        peft_settings(config) if config.lora.lora_rank is not None else None,
    )


def prompts(config: Config) -> object:
    """The first prompts of a run, or why there are none."""
    rollout = config.rollout
    try:
        sources = PromptSet(
            rollout.prompt_data,
            tokenize=_tokenizer(
                config.checkpoint.hf_checkpoint,
                config.applies_chat_template,
                json.dumps(rollout.apply_chat_template_kwargs),
            ),
            fields=prompt_fields(rollout),
            max_prompt_len=longest_prompt(rollout),
            skip_bad=rollout.bad_prompts == "skip",
        )
        cursor = PromptCursor(
            sources,
            shuffle=rollout.rollout_shuffle,
            seed=rollout.rollout_seed,
            weights=rollout.prompt_data_weights,
        )
        return cursor.take(9)
    except DataError as error:
        return str(error)


@functools.cache
def _tokenizer(folder: str, applies: bool, kwargs: str) -> PromptTokenizer:
    return PromptTokenizer(folder, apply_chat_template=applies, template_kwargs=json.loads(kwargs))


def rewards(config: Config) -> object:
    """Rewards of an answer, or why there are none."""
    rollout, prompt = config.rollout, Prompt(0, "", (1,), label="42")
    samples = [
        replace(groups_of(config)[0].samples[0].sample, text=text)
        for text in ("42", "it is \\boxed{42}", "a 42 b")
    ]
    kind = "group" if rollout.group_rm else "custom"
    try:
        if rollout.custom_rm_path is None:
            grader = InlineGrader(reward_function(rollout.rm_type))
            return asyncio.run(grader.grade(prompt, samples))
        return scorer(kind, rollout.custom_rm_path, settings_of(config))(prompt, samples)
    except (ConfigError, ValueError, TypeError) as error:
        return str(error)


PROBES = {
    "grpo": (properties, loss, advantages, guards, requests),
    "rollout": (properties, loss, requests, prompts, rewards),
    "optimizer": (properties, schedule),
    "lora": (requests,),
    "env": (properties,),
}
"""What may depend on a setting, by its table."""


def computed(config: Config, table: str) -> dict[str, str]:
    """What the probes of a table compute, as text; an error is a result as well."""
    found = {}
    for probe in PROBES[table]:
        try:
            value: object = probe(config)
        except (ConfigError, DataError) as error:
            value = error
        found[probe.__name__] = repr(value)
    return found


def said(config: Config) -> set[str]:
    """The settings whose flags the check names, before a remedy."""
    lines = [*check_settings._settings_problems(config), *check_settings.notes(config)]
    words = set(" ".join(line.split(";")[0] for line in lines).replace(":", " ").split())
    return {key for key in fields() if flag(key) in words}


# Other values of each setting


def values(folder: Path) -> dict[str, list[object]]:
    """Values of the settings for which a type alone says too little."""
    mine = f"{folder}/mine.py"
    return {
        "custom_loss_function_path": [f"{mine}:loss"],
        "custom_advantage_function_path": [f"{mine}:advantages"],
        "custom_reward_post_process_path": [f"{mine}:post_process"],
        "custom_rm_path": [f"{mine}:reward"],
        "dynamic_sampling_filter_path": [f"{mine}:keep"],
        "buffer_filter_path": [f"{mine}:last"],
        "custom_generate_function_path": [f"{mine}:write"],
        "rollout_function_path": ["slime.rollout.x.y"],
        "policy_loss": ["gspo", "cispo"],  # ppo is what the estimator names
        "prompt_data": [(str(folder / "more.jsonl"),)],
        "prompt_data_weights": [(1.0, 2.0)],
        "input_key": ["question"],
        "label_key": ["answer"],
        "metadata_key": ["about"],
        "tool_key": ["tools"],
        "multimodal_keys": [{"image": "images"}],
        "apply_chat_template_kwargs": [{"mood": "calm"}],
        "reward_key": ["score"],
        "reward_weights": [{"score": 2.0}],
        "rm_type": ["gsm8k"],
        "rm_url": ["http://h:1"],
        "judge": [str(folder / "judge.toml")],
        "judge_url": ["http://h:1/v1"],
        "judge_engines": ["judge"],
        "judge_model": ["other"],
        "num_epoch": [2],
        "rollout_batch_size": [8],
        "global_batch_size": [2],
        "num_steps_per_rollout": [4],
        "rollout_max_prompt_len": [2],
        "rollout_max_context_len": [3],
        "rollout_top_k": [7],
        "rollout_stop": [("x",)],
        "rollout_stop_token_ids": [(5,)],
        "over_sampling_batch_size": [9],
        "eps_clip_c": [1.05],
        "overlong_buffer_len": [6],
        "guard_initial_kl": [1e-4],
        "guard_rollout_logprob_diff": [0.01],
        "guard_grad_norm_factor": [2.0],
        "opsm_delta": [0.4],
        "tis_clip": [1.01],
        "tis_clip_low": [0.99],
        "lr_decay_iters": [6],
        "min_lr": [1e-8],
        "lr_warmup_init": [1e-8],
        "lr_warmup_fraction": [0.5],
        "lora_targets": [("linear_qkv",)],
        "only_train_params_name_list": [("embedding",)],
        "freeze_params_name_list": [("embedding",)],
        "env": [("rlpost.extensions.agents.examples.guess:Guess",)],
        "env_weights": [(1.0, 2.0)],
        "env_args": [{"guess": {"turns": 2}}],
        "env_key": ["game"],
    }


def alternatives(folder: Path, base: Config, key: str) -> list[object]:
    """Other values of a setting."""
    if key in (known := values(folder)):
        return known[key]
    field = type(getattr(base, fields()[key])).model_fields[key]
    default = value_of(base, key)
    if isinstance(default, bool):
        return [not default]
    parts = list(parts_of(field.annotation))
    if words := [part for part in parts if isinstance(part, str)]:
        return [word for word in words if word != default]
    if int in parts:
        return [(default or 0) + 3]
    assert float in parts, (key, field.annotation)
    return [default / 2 if default else 0.3]


def parts_of(annotation: object) -> Iterator[object]:
    """The types and literals in an annotation."""
    yield annotation
    for part in typing.get_args(annotation):
        yield from parts_of(part)


# fmt: off
COMPANIONS: dict[str, dict[str, object]] = {
    **{key: {"use_tis": True} for key in ("tis_level", "tis_mode", "tis_clip", "tis_clip_low")},
    "opsm_delta": {"use_opsm": True},
    "kl_loss_coef": {"use_kl_loss": True},
    "kl_loss_type": {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_unbiased_kl": True},
    "use_unbiased_kl": {"use_kl_loss": True, "kl_loss_coef": 0.1},
    "ref_update_interval": {"use_kl_loss": True},
    "keep_old_actor": {"rollout_mode": "one_step_off"},
    "gamma": {"advantage_estimator": "ppo"},
    "lambd": {"advantage_estimator": "ppo"},
    "overlong_penalty": {"overlong_buffer_len": 6},
    "punished_reward": {"truncated_answers": "punish"},
    "mtp_loss_scaling_factor": {"enable_mtp_training": True},
    "custom_loss_function_path": {"loss_type": "custom_loss"},
    "prompt_data_weights": {"prompt_data": ("prompts.jsonl", "more.jsonl")},
    "apply_chat_template_kwargs": {"apply_chat_template": True},
    "tool_key": {"apply_chat_template": True},
    "multimodal_keys": {"apply_chat_template": True},
    "bad_prompts": {"prompt_data": ("bad.jsonl",)},
    "rollout_seed": {"rollout_shuffle": True},
    "partial_rollout_record_s": {"partial_rollout": True},
    "max_staleness": {"rollout_mode": "fully_async"},
    "mask_offpolicy_in_partial_rollout": {"partial_rollout": True},
    "group_rm": {"custom_rm_path": "rewards"},
    "reward_key": {"custom_rm_path": "reward"},
    "reward_weights": {"custom_rm_path": "reward"},
    **{key: {"optimizer": "muon", "use_distributed_optimizer": False}
       for key in ("muon_momentum", "muon_nesterov", "muon_num_ns_steps", "muon_scale")},
    "min_lr": {"lr_decay_style": "cosine"},
    "lr_decay_iters": {"lr_decay_style": "cosine"},
    "lr_warmup_init": {"lr_warmup_iters": 4},
    "lr_wsd_decay_iters": {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 1},
    "lr_wsd_decay_style": {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 6},
    "weight_decay_incr_style": {"end_weight_decay": 0.2},
    "start_weight_decay": {"weight_decay_incr_style": "linear", "end_weight_decay": 0.2},
    "end_weight_decay": {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0},
    "optimizer_offload_fraction": {"optimizer_cpu_offload": True},
    "overlap_cpu_optimizer_d2h_h2d": {"optimizer_cpu_offload": True},
    **{key: {"lora_rank": 2} for key in ("lora_alpha", "lora_dropout", "lora_targets")},
    **{key: {"env": ("rlpost.extensions.agents.examples.guess:Guess",)} for key in fields()
       if fields()[key] == "env" and key != "env"},
    "lora_export": {"lora_rank": 2, "save_hf": "/there"},
    "use_rollout_sampling_mask": {"rollout_top_k": 7},
    "global_batch_size": {"num_steps_per_rollout": None},
}
"""Settings with which another one acts; names of files and functions are those of ``folder``."""
# fmt: on


def in_folder(folder: Path, chosen: Mapping[str, object]) -> dict[str, object]:
    """Settings with the paths of files and functions in ``folder``."""
    found = dict(chosen)
    for name, value in chosen.items():
        if name == "prompt_data":
            found[name] = tuple(str(folder / each) for each in typing.cast("tuple[str]", value))
        elif name.endswith("_path"):
            found[name] = f"{folder}/mine.py:{value}"
    return found


def keys() -> list[str]:
    return [key for key, table in fields().items() if table in TABLES]


@pytest.fixture(autouse=True)
def on_gpus() -> Iterator[None]:
    """TransformerEngine's absence is no error of a setting here."""
    with mock.patch.object(optimizer, "has_transformer_engine", lambda: False):
        yield


# fmt: off
CONTEXTS: dict[str, dict[str, object]] = {
    "base": {},
    "supervised": {"loss_type": "sft_loss", "n_samples_per_prompt": 1, "rollout_batch_size": 8},
    "one step": {"num_steps_per_rollout": 1},
    "gspo": {"advantage_estimator": "gspo"},
    "cispo": {"policy_loss": "cispo"},
    "opo": {"advantage_estimator": "opo"},
    "critic": {"advantage_estimator": "ppo"},
    "whitened": {"advantage_estimator": "reinforce_plus_plus_baseline"},
    "own advantages": {"custom_advantage_function_path": "advantages"},
    "post-processed": {"custom_reward_post_process_path": "post_process"},
    "own loss": {"loss_type": "custom_loss", "custom_loss_function_path": "loss"},
    "engines' log-probs": {"use_rollout_logprobs": True},
    "penalty": {"kl_coef": 0.1},
    "own reward": {"custom_rm_path": "reward"},
}
"""Runs in which other settings have nothing to do."""
EXPECTED = {
    "supervised": {"apply_chat_template": "applies anyway: without --label-key rows have messages"},
    "one step": {"advantage_estimator": "gspo is grpo with a loss that differs in more steps alone"},
    "own reward": {"rm_type": "--custom-rm-path is instead of it, and derived recipes override one by the other"},
    "gspo": {"policy_loss": "gspo is the one that the estimator names"},
    "cispo": {"advantage_estimator": "gspo and cispo are grpo with another loss, and that is given"},
}
"""What neither acts nor is said there, and why."""
# fmt: on


@pytest.mark.usefixtures("slime_adapters")
@pytest.mark.parametrize("name", CONTEXTS)
def test_every_setting_that_is_changed_acts_or_the_check_names_it(folder: Path, name: str) -> None:
    base = with_values(base_of(folder), **in_folder(folder, CONTEXTS[name]))
    assert check_settings._settings_problems(base) == []
    tables = {"base": TABLES, "supervised": TABLES[:2], "own reward": TABLES[1:2]}.get(
        name, TABLES[:1]
    )
    before = {table: computed(base, table) for table in tables}
    assert {table: computed(base, table) for table in tables} == before, "a probe is random"
    silent = []
    for key in keys():
        table = fields()[key]
        if table not in tables or key in CONTEXTS[name] or key in EXPECTED.get(name, {}):
            continue
        for value in alternatives(folder, base, key):
            changed = with_values(base, **{key: value})
            acts = computed(changed, table) != before[table]
            if not (acts or key in said(changed) or key in UNSEEN):
                silent.append((key, value))
    assert silent == []


@pytest.mark.usefixtures("slime_adapters")
def test_with_what_it_needs_each_setting_acts_and_the_check_is_silent(folder: Path) -> None:
    """So no row of the check refuses a setting that acts, and no setting is without effect at all."""
    base = base_of(folder)
    wrong = []
    for key in keys():
        start = with_values(base, **in_folder(folder, COMPANIONS.get(key, {})))
        before = computed(start, fields()[key])
        for value in alternatives(folder, base, key):
            changed = with_values(start, **{key: value})
            acts = key in OF_PROCESSES or computed(changed, fields()[key]) != before
            lines = [*no_effect_problems(changed), *no_effect_notes(changed)]
            idle = [line for line in lines if f"{flag(key)} " in line]
            if not acts or idle:
                wrong.append((key, value, acts, idle))
    assert wrong == []


def test_exceptions_and_companions_are_settings_of_these_tables() -> None:
    known = set(keys())
    assert OF_PROCESSES.keys() <= known and COMPANIONS.keys() <= known
    assert {key for row in ROWS for key in row.keys} <= known
