"""Names of other programs for our settings: none hides an option of its own, and each remedy
exists.
"""

from __future__ import annotations

import pytest

from rlpost.config import flags, megatron_options, pass_through
from rlpost.config.load import load
from rlpost.config.model_arguments import NAMES
from rlpost.config.other_flags import ABBREVIATIONS, DERIVED, REMOVED
from rlpost.errors import ConfigError

OF_COMMANDS = {"--run-folder", "--sglang-mem-fraction-static"}
"""Flags that are no settings of the tree: an option of submit, and one that goes on to SGLang."""


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load([], flags.parse(flags.make_parser("test", ""), words)[1])
    return str(caught.value)


@pytest.mark.parametrize(
    ("word", "flag"),
    [
        ("--tp", "--tensor-model-parallel-size"),
        ("--pp", "--pipeline-model-parallel-size"),
        ("--ep", "--expert-model-parallel-size"),
        ("--cp", "--context-parallel-size"),
        ("--gbs", "--global-batch-size"),
        ("--mbs", "--micro-batch-size"),
        ("--bs", "--rollout-batch-size"),
        ("--kl", "--kl-loss-coef"),
        ("--temp", "--rollout-temperature"),
        ("-n", "--n-samples-per-prompt"),
        ("--ckpt", "--hf-checkpoint"),
        ("--learning_rate", "--lr"),
    ],
)
def test_an_abbreviation_of_the_field_names_its_flag(word: str, flag: str) -> None:
    assert refusal(word, "4").startswith(f"{word}: no such flag; use {flag}")
    assert refusal(f"{word}=4").startswith(f"{word}: no such flag; use {flag}")


@pytest.mark.parametrize("name", REMOVED)
def test_a_flag_of_an_earlier_version_is_refused_with_what_to_use(name: str) -> None:
    assert refusal(f"--{name}", "4") == f"--{name}: rlpost 0.2 had this flag; {REMOVED[name]}"


def test_no_name_is_a_flag_or_an_option_of_megatron_and_each_stands_for_flags_that_exist() -> None:
    ours = {flags.flag(key) for key in [*flags.fields(), *NAMES]}
    names = ABBREVIATIONS.keys() | DERIVED.keys() | REMOVED.keys()
    assert not {f"--{name}" for name in names} & ours
    options = megatron_options.option_names() or frozenset()
    assert not {name.replace("-", "_") for name in names} & options
    assert {flag for each in ABBREVIATIONS.values() for flag in each} <= ours | OF_COMMANDS


def test_an_abbreviation_is_refused_where_megatron_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would pass for an option of Megatron-core until the node is asked."""
    monkeypatch.setattr(pass_through, "option_names", lambda: None)
    monkeypatch.setattr(flags, "option_names", lambda: None)
    assert "use --tensor-model-parallel-size" in refusal("--tp", "4")


@pytest.mark.parametrize("word", ["--frobnicate", "--modle-parallel"])
def test_a_word_that_is_like_no_flag_gets_no_suggestion(word: str) -> None:
    assert refusal(word, "4") == f"{word}: unknown setting; --help-all lists every setting"
