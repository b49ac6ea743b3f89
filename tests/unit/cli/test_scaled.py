"""``--scale-down`` on the command line of check, plan and submit."""

from __future__ import annotations

import pytest

from rlpost.cli import check, plan
from rlpost.cli.submit import submit_main
from rlpost.config.load import JOBS
from rlpost.errors import ConfigError

GLM = str(JOBS / "recipes/glm45_355b.toml")


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """No model is here, and no variable names one."""
    monkeypatch.delenv("RLPOST_ASSETS", raising=False)
    monkeypatch.chdir(tmp_path)


def rows(text: str) -> dict[str, list[str]]:
    lines = text.split("\n\n")[0].splitlines()
    assert lines[0].split() == ["setting", "recipe", "scaled"]
    return {line.split()[0]: line.split()[1:] for line in lines[1:]}


def test_the_plan_begins_with_a_table_of_what_is_another_value(capsys):
    assert plan.main([GLM, "--scale-down", "4", "--rollout-batch-size", "16"]) == 0
    said = capsys.readouterr().out
    table = rows(said)
    assert table["perf.tensor_model_parallel_size"] == ["8", "2"]
    assert table["model.num_experts"] == ["160", "10"]
    assert "rollout.rollout_batch_size" not in table, "a flag wins"
    assert "4 GPUs: TP 2 x PP 2 x CP 1 x DP 1, EP 2" in said


def test_without_a_number_two_ranks_train(capsys):
    assert plan.main([GLM, "--scale-down"]) == 0
    assert rows(capsys.readouterr().out)["cluster.actor_num_gpus_per_node"] == ["8", "2"]


@pytest.mark.parametrize("verb", [check.main, submit_main])
def test_a_model_that_is_not_made_yet_is_named_with_the_command_that_makes_it(verb):
    with pytest.raises(ConfigError, match=rf"rlpost fetch {GLM} --scale-down 4$"):
        verb([GLM, "--scale-down", "4"])


def test_print_config_tells_where_scaled_values_come_from(capsys):
    with pytest.raises(SystemExit):
        check.main([GLM, "--scale-down", "--print-config"])
    line = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("hidden_size")
    )
    assert line.split()[:3] == ["hidden_size", "=", "80"] and "--scale-down" in line
