"""Which settings decide results: every setting is changed, and a resume sees what it should."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlpost.config.flags import flag, groups
from rlpost.config.groups.engines import EngineGroup
from rlpost.config.load import dump, parse_dump
from rlpost.config.tree import Config, Tree
from rlpost.config.wording import with_values
from rlpost.durable.provenance import Provenance
from rlpost.durable.result_settings import (
    TABLE,
    Change,
    compare,
    difference,
    result_settings,
    rule_of,
)

USED = Config.model_validate(
    {
        "checkpoint": {"hf_checkpoint": "m"},
        "rollout": {"prompt_data": "p"},
        "grpo": {"advantage_estimator": "ppo", "eps_clip": 0.2, "eps_clip_high": 0.2},
        "lora": {"lora_rank": 8},
    }
)
USED = USED.model_copy(
    update={
        "env": USED.env.model_copy(update={"env": ("module:Class",)}),
        "distillation": USED.distillation.model_copy(update={"use_opd": True}),
        "optimizer": USED.optimizer.model_copy(update={"lr_decay_style": "linear"}),
    }
)
"""A configuration in which every table has an effect."""
DERIVED = {
    # What follows from several settings enters by its value.
    "global_batch_size": "trained",
    "num_steps_per_rollout": "trained",
    "num_rollout": "trained",
    "num_epoch": "neither",
    "lr_decay_iters": "trained",
}
"""Settings that enter by a derived value; with a constant learning rate the last do not."""
SWITCHES = {"env", "use_opd", "advantage_estimator"}
"""Settings that bring in or leave out a whole table."""


def settings() -> Iterator[tuple[str, str]]:
    for group in Config.model_fields:
        for key in type(getattr(USED, group)).model_fields:
            yield group, key


def changed(group: str, key: str) -> Config:
    """The configuration with another value of one setting, whatever its type."""
    value = getattr(getattr(USED, group), key)
    other: Any = f"another {value}"
    if key == "policy_loss":  # others follow from its row
        other = "cispo"
    elif isinstance(value, bool):
        other = not value
    elif isinstance(value, int | float):
        other = value + 7
    elif isinstance(value, tuple):
        other = (*value, "another")
    elif isinstance(value, Mapping):
        other = {**value, "another": 1}
    elif value is None and ("lr" in key or "num" in key or "size" in key or "len" in key):
        other = 3
    table = getattr(USED, group).model_copy(update={key: other})
    return USED.model_copy(update={group: table})


def kinds(config: Config, before: Config = USED) -> set[str]:
    """What a resume sees: whether generation or training has changed."""
    change = compare(result_settings(before).to_json(), result_settings(config).to_json())
    return {kind for kind in ("generated", "trained") if getattr(change, kind)}


def test_every_table_has_a_rule_and_every_name_in_a_rule_is_a_setting():
    assert TABLE.keys() == Tree.model_fields.keys()
    for group in Config.model_fields:
        rule = rule_of(group)
        named = rule.generated | rule.trained | rule.neither
        own = set(type(getattr(USED, group)).model_fields)
        assert {key for key in named - own if not key.startswith("sglang_")} == set(), group
        assert len(named) == len(rule.generated) + len(rule.trained) + len(rule.neither), group


@pytest.mark.filterwarnings("ignore:Pydantic serializer")
@pytest.mark.parametrize("group", list(Config.model_fields))
def test_a_change_of_any_setting_is_seen_as_what_it_decides_and_named(group):
    """Journal and checkpoint see the same: there is one table."""
    before = Provenance.of(USED, {})
    for name, key in settings():
        if name != group or key in SWITCHES:
            continue
        config, kind = changed(group, key), DERIVED.get(key, rule_of(group).kind(key))
        if key in DERIVED:
            assert kinds(config) <= {kind}, key
            continue
        assert kinds(config) == ({kind} - {"neither"}), (group, key)
        assert (Provenance.of(config, {}).settings != before.settings) == (kind != "neither"), key
        if kind != "neither":
            change = compare(result_settings(USED).to_json(), result_settings(config).to_json())
            (line,) = getattr(change, kind)
            assert line.startswith(f"{key}: ") and " -> " in line, flag(key)


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        ({"sglang": {"sglang_kv_cache_dtype": "fp8_e5m2"}}, {"generated"}),
        ({"sglang": {"sglang_mem_fraction_static": 0.5}}, set()),
        ({"megatron": {"layernorm_epsilon": 0.5}}, {"trained"}),
    ],
)
def test_options_that_are_passed_on_are_seen_too(table, kind):
    plain = Config.model_validate({"checkpoint": {"hf_checkpoint": "m"}})
    config = Config.model_validate({"checkpoint": {"hf_checkpoint": "m"}, **table})
    assert kinds(config, plain) == kind


def test_the_models_of_judges_decide_rewards_and_their_engines_do_not():
    def of(**group):
        judge = EngineGroup.model_validate({"model": "j", "engines": 1, **group})
        return USED.model_copy(
            update={"engines": USED.engines.model_validate({"judge": judge.model_dump()})}
        )

    assert kinds(of(engines=2, timeout_s=5.0), of()) == set()
    assert kinds(of(model="k"), of()) == {"generated"} == kinds(of())


def test_weights_are_compared_by_content_and_texts_of_other_versions_are_a_change():
    before = result_settings(USED, {"--hf-checkpoint": "aa"}).to_json()
    now = result_settings(USED, {"--hf-checkpoint": "bb"}).to_json()
    assert compare(before, before) == Change()
    assert compare(before, now).generated == ("content of --hf-checkpoint: 'aa' -> 'bb'",)
    for text in ("0123456789abcdef", "{}", "[1]", "3"):
        assert compare(text, now).generated == ("recorded by another version of rlpost",)


def test_a_setting_that_another_version_lacks_is_one_that_is_not_set():
    now = json.loads(result_settings(USED).to_json())
    before = json.loads(result_settings(USED).to_json())
    before["generated"] |= {"opd_teacher_load": None, "opd_type": "sglang"}
    unset = [key for key, value in now["trained"].items() if value is None]
    assert unset and not before["trained"].pop(unset[0])
    assert compare(json.dumps(before), json.dumps(now)) == Change()
    before["generated"]["opd_teacher_load"] = "/t"
    assert compare(json.dumps(before), json.dumps(now)).generated == (
        "opd_teacher_load: '/t' -> None",
    )


def test_a_table_without_effect_on_the_run_may_change():
    plain = Config.model_validate({"checkpoint": {"hf_checkpoint": "m"}})
    table = plain.env.model_copy(update={"env_max_turns": 77})
    assert kinds(plain.model_copy(update={"env": table}), plain) == set()
    for name, key in (("critic", "critic_lr"), ("lora", "lora_alpha")):
        table = getattr(plain, name).model_copy(update={key: 77.0})
        assert kinds(plain.model_copy(update={name: table}), plain) == set()


def test_no_secret_is_recorded_or_named_and_a_changed_one_is_a_change() -> None:
    one, other = (
        USED.model_copy(
            update={"env": USED.env.model_copy(update={"env_args": {"key": key, "n": 1}})}
        )
        for key in ("S3cr3t", "0ther")
    )
    before, now = (result_settings(config).to_json() for config in (one, other))
    assert "S3cr3t" not in before and '\\"n\\": 1' in before
    (line,) = compare(before, now).generated
    assert line.startswith("env_args: ") and "0ther" not in line
    plain = {"env_args": one.env.env_args}  # as earlier versions recorded it
    assert "S3cr3t" not in difference(plain, {"env_args": 1})[0]


EARLIER = json.loads(Path(__file__).with_name("run_with_model_table.json").read_text())
"""Settings and recorded values of a run of 0.2, whose [model] stated the architecture of
Qwen3-30B-A3B beside its config.json, with another base of the rotary embedding."""
WEIGHTS = {"--hf-checkpoint": "abc"}


def test_a_setting_that_an_earlier_version_lacks_counts_at_its_default():
    """For every setting: without it in the record, only another value than the default is a change."""
    fields = {key: one for table in groups().values() for key, one in table.model_fields.items()}
    recorded = json.loads(result_settings(USED).to_json())
    for kind in ("generated", "trained"):
        for key, value in recorded[kind].items():
            before = {**recorded, kind: {k: v for k, v in recorded[kind].items() if k != key}}
            lines = compare(json.dumps(before), json.dumps(recorded))
            usual = fields[key].get_default(call_default_factory=True) if key in fields else None
            is_usual = value in (None, [], {}, list(usual) if isinstance(usual, tuple) else usual)
            assert (lines == Change()) == is_usual, (key, value, lines)


def test_a_journal_of_a_version_that_stated_the_architecture_is_resumed():
    """What it recorded of the model agreed with config.json, whose folder has the fingerprint."""
    config = parse_dump(json.dumps(EARLIER["run"]))
    assert config.checkpoint.override_hf_config == {"rotary_base": 10000.0}
    assert config.checkpoint.model_args["num_layers"] == 48
    assert (config.perf.moe_grouped_gemm, config.perf.moe_permute_fusion) == (True, True)
    recorded = json.dumps(EARLIER["results"])
    now = result_settings(config, WEIGHTS)
    assert compare(recorded, now.to_json()) == Change()
    assert parse_dump(dump(config)) == config

    other = with_values(config, override_hf_config={"rotary_base": 20000.0})
    (line,) = compare(recorded, result_settings(other, WEIGHTS).to_json()).generated
    assert line.startswith("override_hf_config: ")
    router = with_values(config, moe_router_dtype="fp64")
    assert compare(recorded, result_settings(router, WEIGHTS).to_json()).generated == (
        "moe_router_dtype: 'fp32' -> 'fp64'",
    )


def test_an_override_that_is_given_up_voids_the_journal():
    before = parse_dump(json.dumps(EARLIER["run"]))
    after = with_values(before, override_hf_config={})
    found = compare(result_settings(before).to_json(), result_settings(after).to_json())
    assert found.generated == ("override_hf_config: {'rotary_base': 10000.0} -> {}",)
    kept = with_values(before, model_args={})
    assert compare(result_settings(before).to_json(), result_settings(kept).to_json()) == Change()
