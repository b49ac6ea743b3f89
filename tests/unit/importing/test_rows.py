"""Keys of verl and NeMo-RL: published values become settings that pass, and no key is dropped."""

from __future__ import annotations

import random
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from rlpost.cli.check_settings import check
from rlpost.config import flags
from rlpost.config.load import load
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.extensions.importing.imported import Imported, imported
from rlpost.extensions.importing.peers import row
from rlpost.extensions.importing.peers.nemo_rl import NEMO_RL
from rlpost.extensions.importing.peers.row import ABSENT, Entry, Stack
from rlpost.extensions.importing.peers.verl import VERL
from rlpost.extensions.importing.yaml_file import read_yaml

DATA = Path(__file__).parents[2] / "data"
TRANSFORMER = "actor_rollout_ref.actor.megatron.override_transformer_config"
MADE_UP = "rlpost knows no such key"


def table(name: str) -> dict[str, object]:
    return {key: _plain(value) for key, value in tomllib.loads((DATA / name).read_text()).items()}


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return None if value == "null" else value


DEFAULTS: dict[str, dict[str, object]] = {
    "verl": table("verl_defaults.toml"),
    "NeMo-RL": {key: entry.value for key, entry in read_yaml(None).entries.items()},
}
SCRIPTS = {
    **{("verl", name): keys for name, keys in table("verl_scripts.toml").items()},
    **{("NeMo-RL", name): keys for name, keys in table("nemo_rl_recipes.toml").items()},
}
STACKS = {"verl": VERL, "NeMo-RL": NEMO_RL}
# A published file lacks what only its machine has: folders of models and data.
NO_DATA = ("--hf-checkpoint is not given", "--prompt-data is not given", "--eval-interval")
REFUSED = {
    # Its groups have one answer, which verl trains on the reward itself.
    "rollout_correction/run_qwen2_5_7b_fsdp": "--n-samples-per-prompt 1: --advantage-estimator rloo",
    "on_policy_distillation_trainer/run_qwen3_0.6b_opd_veomni": "--n-samples-per-prompt 1",
}
"""Script -> the first words of the one line that refuses its recipe. All others pass."""


def entries(stack: str, name: str) -> dict[str, Entry]:
    keys = SCRIPTS[stack, name]
    if stack == "NeMo-RL":
        keys = {**DEFAULTS[stack], **keys}
    return {key: Entry(value, 1) for key, value in keys.items() if value != "absent"}


def result_of(stack: Stack, given: dict[str, Entry]) -> Imported:
    return imported([row.answer(stack, key, given) for key in given], row.defaults(stack, given))


@pytest.mark.parametrize("stack", STACKS)
def test_every_key_of_a_stack_has_a_row_with_the_stacks_own_default(stack):
    for key, value in DEFAULTS[stack].items():
        found = STACKS[stack].find(key)
        assert found is not None, key
        default = found[0].default
        if default is not ABSENT and found[0].keys[0] == key:
            assert row.same(default, value), (key, default, value)


@pytest.mark.parametrize("stack", STACKS)
def test_the_settings_of_rows_exist(stack):
    names = {name for one in STACKS[stack].rows for name in one.settings}
    assert {name for name in names if not name.startswith("sglang_")} - {
        "mtp_loss_scaling_factor"
    } <= set(flags.fields())
    keys = Counter(key for one in STACKS[stack].rows for key in one.keys)
    assert not [key for key, count in keys.items() if count > 1]


@pytest.mark.parametrize(("stack", "name"), SCRIPTS)
def test_a_published_script_becomes_a_recipe_that_loads_and_passes(stack, name):
    given = entries(stack, name)
    result = result_of(STACKS[stack], given)
    listed = [one.key for one in (*result.taken, *result.left) if not one.is_default]
    assert Counter(listed) == Counter(list(given))
    assert not [one.key for one in result.left if one.why.startswith(MADE_UP)]
    tables = tomllib.loads(result.recipe(name))
    config = load([], tables).config
    assert config == load([], result.settings).config
    try:
        check(config, is_dry=True)
        problems = []
    except ConfigError as error:
        problems = str(error).splitlines()
    problems = [
        line for line in problems if not line.startswith(NO_DATA) and "RLPOST_ASSETS" not in line
    ]
    refused = REFUSED.get(name)
    assert [line.startswith(refused or "?") for line in problems] == [True] * (
        refused is not None
    ), problems


@pytest.mark.parametrize(("stack", "name"), SCRIPTS)
def test_units_are_those_of_rlpost(stack, name):
    """Batches count answers; the settings agree with sums over the published values."""
    given = {**DEFAULTS[stack], **{key: one.value for key, one in entries(stack, name).items()}}
    config = load([], result_of(STACKS[stack], entries(stack, name)).settings).config
    if stack == "verl":
        answers = given["actor_rollout_ref.rollout.n"]
        prompts = given["data.train_batch_size"]
        mini_batch = given["actor_rollout_ref.actor.ppo_mini_batch_size"] * answers
        response = given["data.max_response_length"]
        rate = given["actor_rollout_ref.actor.optim.lr"]
    else:
        answers = given["grpo.num_generations_per_prompt"]
        prompts = given["grpo.num_prompts_per_step"]
        mini_batch = given["policy.train_global_batch_size"]
        response = given["policy.generation.max_new_tokens"]
        is_megatron = given["policy.megatron_cfg.enabled"]
        rate = given[f"policy.{'megatron_cfg.optimizer' if is_megatron else 'optimizer.kwargs'}.lr"]
    rollout = config.rollout
    assert rollout.n_samples_per_prompt == answers and rollout.rollout_batch_size == prompts
    assert rollout.global_batch_size == mini_batch
    assert config.num_steps_per_rollout == prompts * answers // mini_batch
    assert rollout.rollout_max_response_len == response
    assert config.optimizer.lr == pytest.approx(rate)


@pytest.mark.parametrize("stack", STACKS)
def test_unknown_keys_and_values_are_named_and_none_is_dropped(stack):
    """Keys and values at random: each ends in one list, and what is refused has a reason."""
    source = random.Random(5)
    known = list(DEFAULTS[stack])
    words = ["x", "zeta", "loss", "grpo", "actor", "v2", "use_foo"]
    values = [None, True, False, -1, 0, 3, 1e-3, "text", "", ["a", 1], [], {"a": 1}, "1e-6"]
    values += [10**30, float("inf"), float("nan"), 10**400]
    for _ in range(30):
        made_up = {".".join(source.choices(words, k=3)) + str(index) for index in range(5)}
        below = {f"{source.choice(known)}_{source.choice(words)}" for _ in range(5)} - set(known)
        chosen = set(source.sample(known, 20))
        given = {key: Entry(source.choice(values), 1) for key in sorted(made_up | below | chosen)}
        result = result_of(STACKS[stack], given)
        listed = [one for one in (*result.taken, *result.left) if not one.is_default]
        assert Counter(one.key for one in listed) == Counter(list(given))
        assert all(one.settings or one.why for one in listed)
        assert made_up <= {one.key for one in result.left}
        load([], tomllib.loads(result.recipe("random")))


def test_a_default_of_the_stack_that_is_ours_too_sets_nothing():
    settings = result_of(VERL, {}).settings
    ours = Config()
    for name, keys in settings.items():
        for key, value in keys.items():
            changed = load([], settings).config
            assert getattr(getattr(changed, name), key) != getattr(getattr(ours, name), key), (
                key,
                value,
            )


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        # Rollouts of 64 prompts are 4 optimizer steps of 16: verl's warm-up counts rollouts.
        (
            {
                "data.train_batch_size": 64,
                "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
                "actor_rollout_ref.actor.optim.lr_warmup_steps": 10,
            },
            {"lr_warmup_iters": 10 * 4},
        ),
        (
            {"algorithm.adv_estimator": "gae", "trainer.critic_warmup": 5},
            {"num_critic_only_steps": 4},
        ),
        (
            {"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"},
            {"calculate_per_token_loss": None},
        ),
        ({"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"}, {"eps_clip_c": None}),
        ({"data.image_key": "images"}, {"multimodal_keys": {"image": "images"}}),
        ({}, {"multimodal_keys": None}),
        (
            {
                "algorithm.adv_estimator": "gae",
                "data.train_batch_size": 64,
                "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
                "trainer.total_training_steps": 100,
                "critic.optim.lr_warmup_steps_ratio": 0.05,
            },
            {"critic_lr_warmup_iters": 5 * 4},
        ),
        (
            {
                "actor_rollout_ref.model.override_config.rope_theta": 1e6,
                "actor_rollout_ref.model.override_config.model_config.num_experts_per_tok": 4,
                "actor_rollout_ref.model.override_config.attention_dropout": 0.0,
            },
            {"override_hf_config": {"rotary_base": 1e6, "moe_router_topk": 4}},
        ),
        (
            {
                f"{TRANSFORMER}.num_layers": 36,
                f"{TRANSFORMER}.moe_router_topk": 8,
                f"{TRANSFORMER}.attention_dropout": 0.0,
                f"{TRANSFORMER}.moe_router_load_balancing_type": "none",
            },
            {"model_args": {"num_layers": 36, "moe_router_topk": 8}},
        ),
        ({"actor_rollout_ref.nccl_timeout": 1200}, {"distributed_timeout_minutes": 20}),
        (
            {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.01},
            {"kl_coef": 0.01, "kl_loss_type": "k1"},
        ),
        ({"data.image_key": "images"}, {"vision_tower": "all"}),
        (
            {"data.image_key": "images", "actor_rollout_ref.actor.freeze_vision_tower": True},
            {"vision_tower": "frozen"},
        ),
        (  # the default, frozen
            {"data.image_key": "images", "actor_rollout_ref.model.lora_rank": 8},
            {"vision_tower": None},
        ),
    ],
)
def test_conditions_and_units_of_verl(given, settings):
    made = result_of(VERL, {key: Entry(value) for key, value in given.items()}).settings
    flat = {key: value for entries in made.values() for key, value in entries.items()}
    assert {key: flat.get(key) for key in settings} == settings


def test_what_does_not_convert_is_said():
    """Keys of verl with a value that rlpost cannot have, beside the keys that make it so."""
    for given, key, said in LEFT:
        result = result_of(VERL, {name: Entry(value) for name, value in given.items()})
        reasons = {one.key: one.why for one in result.left}
        assert said in reasons.get(key, ""), (key, reasons)


def test_verls_own_defaults_of_the_critic_are_not_left():
    given = DEFAULTS["verl"] | {"algorithm.adv_estimator": "gae"}
    result = result_of(VERL, {key: Entry(value, 1) for key, value in given.items()})
    assert not [one for one in result.left if one.key.startswith("critic.")]


LEFT: list[tuple[dict[str, object], str, str]] = [
    (
        {"trainer.total_training_steps": 500, "trainer.total_epochs": 2},
        "trainer.total_epochs",
        "after 2 epochs or 500 steps",
    ),
    ({"trainer.total_training_steps": 500}, "trainer.total_epochs", "after 30 epochs or 500 steps"),
    ({"trainer.save_freq": 20}, "trainer.max_actor_ckpt_to_keep", "verl keeps all checkpoints"),
    *(
        (
            {"algorithm.adv_estimator": "gae", f"critic.{key}": value},
            f"critic.{key}",
            "of the policy",
        )
        for key, value in {
            "ppo_mini_batch_size": 128,
            "grad_clip": 0.5,
            "optim.weight_decay": 0.1,
            "optim.betas": [0.9, 0.95],
            "optim.lr_scheduler_type": "cosine",
        }.items()
    ),
    (
        {"algorithm.adv_estimator": "gae", "critic.optim.lr_warmup_steps_ratio": 0.1},
        "critic.optim.lr_warmup_steps_ratio",
        "use --critic-lr-warmup-iters",
    ),
    (
        {"actor_rollout_ref.model.override_config.max_position_embeddings": 65536},
        "actor_rollout_ref.model.override_config.max_position_embeddings",
        "config.json states max_position_embeddings",
    ),
    (
        {f"{TRANSFORMER}.moe_aux_loss_coeff": 0.01},
        f"{TRANSFORMER}.moe_aux_loss_coeff",
        "only 0 is supported",
    ),
]


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({"grpo.normalize_rewards": False}, {"advantage_estimator": "rloo"}),
        (
            {"grpo.use_leave_one_out_baseline": False, "grpo.normalize_rewards": False},
            {"disable_grpo_std_normalization": True},
        ),
        ({}, {"advantage_estimator": None}),
        (
            {
                "policy.megatron_cfg.enabled": True,
                "policy.megatron_cfg.context_parallel_size": 4,
                "policy.sequence_packing.train_mb_tokens": 8192,
            },
            {"max_tokens_per_gpu": 8192 // 4},
        ),
        (
            {
                "policy.generation.colocated.enabled": False,
                "policy.generation.colocated.resources.num_nodes": 3,
                "policy.generation.colocated.resources.gpus_per_node": 4,
                "cluster.num_nodes": 8,
                "cluster.gpus_per_node": 8,
            },
            {"actor_num_nodes": 8 - 3, "rollout_num_gpus": 3 * 4},
        ),
    ],
)
def test_conditions_and_units_of_nemo_rl(given, settings):
    made = result_of(NEMO_RL, {key: Entry(value) for key, value in given.items()}).settings
    flat = {key: value for entries in made.values() for key, value in entries.items()}
    assert {key: flat.get(key) for key in settings} == settings


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("actor_rollout_ref.rollout.n=8", "use --n-samples-per-prompt 8"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=64", "prompts there, answers here"),
        ("++grpo.num_prompts_per_step=32", "use --rollout-batch-size 32"),
        ("data.image_key=images", 'use --multimodal-keys \'{"image": "images"}\''),
        ("async_training.staleness_threshold=0.5", "--max-staleness counts weight versions"),
    ],
)
def test_a_key_of_another_stack_on_the_command_line_is_answered_by_its_row(word, said):
    parser = flags.make_parser("test", "")
    for words in ([word], ["tiny", word], ["tiny", "--lr", "1e-6", word]):
        with pytest.raises(ConfigError, match=r"a key of (verl|NeMo-RL)") as caught:
            flags.parse(parser, words)
        assert said in str(caught.value)
    flags.parse(parser, ["tiny", "--environment", "A=b.c=d"])


def test_a_value_of_a_flag_is_no_key_of_another_stack():
    parser = flags.make_parser("test", "")
    words = ["--prompt-data", "a.jsonl", "env.date=2024.jsonl", "--lr", "1e-6", "--save", "env.a=b"]
    _, values = flags.parse(parser, ["tiny", *words])
    assert values["rollout"]["prompt_data"] == words[1:3]
