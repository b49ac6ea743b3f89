"""``--num-epoch``: steps from the rows of the prompt files, as slime counts them."""

from __future__ import annotations

import pytest

from rlpost.cli import command_line
from rlpost.config.load import Loaded, dump, parse_dump
from rlpost.errors import ConfigError
from rlpost.extensions.planning.plan_verb import main
from tests.unit.tasks.sets import numbered, write_parquet


def loaded(*flags: str) -> Loaded:
    return command_line.settings(command_line.make_parser("rlpost check", ""), flags)[1]


@pytest.fixture
def seven(tmp_path) -> str:
    return str(numbered(tmp_path / "seven.jsonl", 7))


def test_an_epoch_has_the_whole_batches_of_all_files(seven, tmp_path):
    parquet = str(write_parquet(tmp_path / "five.parquet", [{"input": "a"}] * 5))
    given = ("--prompt-data", seven, f"{parquet}@[1:]", "--rollout-batch-size", "4")
    found = loaded(*given, "--num-epoch", "3")
    assert found.config.rollout.num_rollout == (7 + 4) // 4 * 3
    assert found.origins["rollout.num_rollout"] == "--num-epoch"
    assert loaded(*given).config.rollout.num_rollout == 1


def test_a_requeued_run_keeps_its_number_of_steps(seven, tmp_path):
    config = loaded("--prompt-data", seven, "--num-epoch", "2").config
    numbered(tmp_path / "seven.jsonl", 9)
    assert parse_dump(dump(config)).rollout.num_rollout == 14


def test_a_recipe_with_both_numbers_must_agree(seven):
    both = ("--prompt-data", seven, "--num-epoch", "2", "--num-rollout")
    assert loaded(*both, "14").config.rollout.num_rollout == 14
    with pytest.raises(
        ConfigError, match=r"14 steps \(7 rows, 1 a step\).*--num-rollout 15 is given"
    ):
        loaded(*both, "15")


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        (("--rollout-batch-size", "8"), "7 rows, fewer than --rollout-batch-size 8"),
        (("--prompt-data-weights", "1"), "use --num-rollout"),
        (("--prompt-data", "missing.jsonl"), "missing.jsonl: cannot read"),
    ],
)
def test_epochs_that_cannot_be_counted_are_refused(seven, more, wanted):
    with pytest.raises(ConfigError, match=wanted):
        loaded("--prompt-data", seven, "--num-epoch", "2", *more)


def rows(capsys, *flags):
    main(["glm45_355b", "--gpu-memory", "80GB", *flags])
    return " ".join(capsys.readouterr().out.split())


def test_routes_of_the_flagship_have_their_price(capsys):
    """89 MoE layers of 8 experts, 1,024 answers of at most 33,792 tokens; SGLang keeps 92 layers of
    8 x 4 bytes.
    """
    shown = rows(capsys, "--use-rollout-routing-replay", "true")
    assert "712 bytes a token: at most 24.6 GB a step in the driver" in shown
    kv_tokens = int(shown.split(" tokens an engine")[0].split()[-1].replace(",", ""))
    assert (
        f"{kv_tokens * 92 * 8 * 4 / 1e9:.1f} GB of host memory for each GPU of an engine" in shown
    )
    assert "bytes a token" not in rows(capsys)
