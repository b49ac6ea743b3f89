"""Each flag of slime is supported here, or refused with a remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rlpost
from rlpost.cli.secret_file import KEY_FLAGS
from rlpost.config import flags, pass_through
from rlpost.config.load import load
from rlpost.config.megatron_options import option_names
from rlpost.config.model_arguments import NAMES
from rlpost.config.server_arg_values import server_arg_table
from rlpost.errors import ConfigError
from rlpost.extensions.slime.flags import LACKING
from tools.pages.slime_flags import slime_flags

ONLY_CHECKED = {"rollout_function_path", "eval_function_path", "wandb_mode", "opd_type"}
"""Flags whose values are settings here if slime provides the function; checks refuse all others. The
mode of W&B acts through ``WandbConfig.mode_in``; a teacher is always on SGLang."""
NO_USE = (
    "config/groups/",
    "config/checks/",
    "compat/",
    "config/signatures.py",
    "extensions/slime/flags.py",
    "durable/result_settings.py",
    "durable/journal.py",
)
"""Code that defines, checks or lists settings, but does not use them."""
OWN = {flags.flag(key) for key in [*flags.fields(), *NAMES]} | KEY_FLAGS.keys()


def is_passed_on(name: str) -> bool:
    """Whether the installed SGLang or Megatron-core has the option."""
    key = name.replace("-", "_")
    if key.startswith("sglang_"):
        table = server_arg_table()
        return table.name_of(key.removeprefix("sglang_")) in table.args
    return pass_through.owner(key, ()) == "megatron"


def test_each_flag_of_slime_is_known_in_exactly_one_way() -> None:
    for name in slime_flags():
        is_own = f"--{name}" in OWN
        ways = [is_own, name in LACKING, not is_own and is_passed_on(name)]
        assert sum(ways) == 1, (name, ways)


def test_no_flag_of_slime_is_accepted_and_ignored() -> None:
    """Each accepted setting is named in the code that uses settings."""
    root = Path(rlpost.__file__).parent
    words: set[str] = set()
    for file in root.rglob("*.py"):
        if not str(file.relative_to(root)).startswith(NO_USE):
            words |= set(re.findall(r"\w+", file.read_text()))
    accepted = [name for name in slime_flags() if f"--{name}" in OWN - KEY_FLAGS.keys()]
    assert {name.replace("-", "_") for name in accepted} - words == ONLY_CHECKED


def test_only_flags_of_slime_are_listed_and_none_hides_an_option_of_megatron() -> None:
    assert LACKING.keys() <= set(slime_flags())
    assert not {name.replace("-", "_") for name in LACKING} & set(option_names() or ())


@pytest.mark.parametrize("name", sorted(LACKING))
def test_the_flags_that_a_remedy_names_exist(name: str) -> None:
    named = re.findall(r"--[a-z][\w-]*", LACKING[name])
    assert all(word in OWN or is_passed_on(word[2:]) for word in named), named


def test_a_flag_of_slime_and_its_key_in_a_recipe_are_refused_with_a_remedy(tmp_path) -> None:
    made = flags.make_parser("rlpost", "")
    with pytest.raises(ConfigError, match="--ci-test: a flag of slime"):
        flags.parse(made, ["--ci-test"])
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[rollout]\nstart_rollout_id = 3\n")
    with pytest.raises(ConfigError, match=r"unknown key 'start_rollout_id'.*use --load"):
        load([recipe], {})
    with pytest.raises(ConfigError, match="--sglang-router-ip: a flag of slime"):
        flags.parse(made, ["--sglang-router-ip", "10.0.0.1"])
