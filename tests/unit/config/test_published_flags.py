"""Command lines of Megatron-LM and slime: every flag is known, and scripts pass or say why not."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from rlpost.cli.check_settings import check
from rlpost.config import flags, pass_through
from rlpost.config.load import load
from rlpost.config.megatron_options import option_names
from rlpost.config.model_arguments import NAMES
from rlpost.config.other_flags import ABBREVIATIONS, DERIVED, REMOVED
from rlpost.config.published_flags import FALSE_OF_FIELD, OTHER_NAME_OF_FIELD
from rlpost.errors import ConfigError
from rlpost.extensions.slime.flags import LACKING
from rlpost.extensions.slime.megatron_flags import ACCEPTED, REFUSED
from tools.pages.slime_flags import megatron_flags

DATA = Path(__file__).parents[2] / "data" / "slime_scripts.toml"
SCRIPTS = tomllib.loads(DATA.read_text())
REASONS = {
    # 8 GPUs in 2 pipeline stages
    "run-glm4.7-30B-A3B": ("--expert-model-parallel-size 8 x --expert-tensor-parallel-size 1 = 8",),
    "run-glm5-744B-A40B": ("--enable-experimental", "--allgather-cp", "--prefill-num-servers"),
    "run-glm5.2-744B-A40B": ("--enable-experimental", "--allgather-cp", "--sglang-config"),
    "run-qwen3.5-27B": ("--sglang-mamba-scheduler-strategy: the installed SGLang",),
}
"""Script -> the first words of every line that refuses it. All others pass."""
PARSER = flags.make_parser("test", "")


def words_of(script: dict[str, object]) -> list[str]:
    words = []
    for name, value in script.items():
        words.append(f"--{name}")
        if value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return words


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_published_script_passes_or_is_refused_for_its_reason(name: str) -> None:
    lines: list[str] = []
    try:
        check(load([], flags.parse(PARSER, words_of(SCRIPTS[name]))[1]).config, is_dry=True)
    except ConfigError as error:
        lines = str(error).splitlines()
    reasons = REASONS.get(name, ())
    assert len(lines) == len(reasons), lines
    assert all(any(line.startswith(reason) for line in lines) for reason in reasons), lines


def test_each_flag_of_megatron_is_known_in_exactly_one_way() -> None:
    tables = (FALSE_OF_FIELD, OTHER_NAME_OF_FIELD, ACCEPTED, REFUSED, LACKING)
    for name in megatron_flags():
        key = name.replace("-", "_")
        ways = [name in table for table in tables]
        is_own = key in flags.fields() or key in NAMES
        is_field = not any(ways) and not is_own and pass_through.owner(key, ()) == "megatron"
        is_meant = name in {**ABBREVIATIONS, **DERIVED, **REMOVED}
        assert sum((*ways, is_own, is_field, is_meant)) == 1, name
    fields = {*FALSE_OF_FIELD.values(), *OTHER_NAME_OF_FIELD.values()}
    assert fields <= (option_names() or set())


def test_all_unknown_and_refused_flags_are_named_at_once() -> None:
    words = ["--num-rolout", "1", "--train-iters", "5", "--frobnicate", "--tp", "2", "--lr", "1e-6"]
    with pytest.raises(ConfigError) as caught:
        flags.parse(PARSER, words)
    lines = sorted(str(caught.value).splitlines())
    named = [line.partition(":")[0] for line in lines]
    assert named == ["--frobnicate", "--num-rolout", "--tp", "--train-iters"]
    assert "did you mean '--num-rollout'" in lines[1] and "--num-rollout steps" in lines[3]


def test_flags_without_effect_are_accepted_with_a_note() -> None:
    words = ["--log-interval", "1", "--use-fault-tolerance", "--no-offload-train", "--lr", "1e-6"]
    namespace, values = flags.parse(PARSER, words)
    first, second = namespace.flag_notes
    assert first.startswith("--log-interval has no effect: metrics")
    assert second.startswith("--use-fault-tolerance has no effect: rlpost always does this")
    assert load([], values).config.optimizer.lr == pytest.approx(1e-6)
    assert "false" in [value for table in values.values() for value in table.values()]


def test_a_flag_of_megatron_sets_the_field_that_it_stands_for() -> None:
    words = ["--no-masked-softmax-fusion", "--fp8-format", "hybrid", "--use-gated-attention"]
    values = flags.parse(PARSER, words)[1]
    assert values["megatron"] == {"masked_softmax_fusion": False, "fp8": "hybrid"}
    assert values["checkpoint"] == {"model_args": {"attention_output_gate": "true"}}


def test_layers_of_a_user_are_refused() -> None:
    with pytest.raises(ConfigError, match="--spec mine layers: layers cannot be replaced"):
        flags.parse(PARSER, ["--spec", "mine", "layers"])
    assert flags.parse(PARSER, ["--spec", "slime_plugins.models.glm4", "get_glm_spec"])[
        0
    ].flag_notes
