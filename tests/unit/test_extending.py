"""The examples of docs/extending.md, written into a folder, do what the page says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from rlpost.algorithm.advantage import custom_advantages
from rlpost.algorithm.objective import Tokens, loss_function
from rlpost.cli.main import main as rlpost
from rlpost.config.plugin_settings import settings_of
from rlpost.config.tree import Config
from rlpost.errors import WeightError
from rlpost.extensions.slime.arguments import Arguments
from rlpost.models.families import FAMILIES, family
from rlpost.rollout.filters import group_filter
from rlpost.tasks.reward.grader import make_grader
from rlpost.types import Prompt, Sample, SampleGroup, ScoredSample
from tests.examples import write_examples
from tests.settings import loss_settings
from tests.unit.cli.projects import make_project

ROOT = Path(__file__).parents[2]
ANSWERS = ("one\ntwo\n42", "42", "so 43")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's project with the files of the page."""
    return write_examples(make_project(tmp_path_factory.mktemp("user")))


def samples() -> tuple[Sample, ...]:
    return tuple(
        Sample(7, i, (1,), (2, 3), (0.0, 0.0), text, "stop", 0) for i, text in enumerate(ANSWERS)
    )


def test_a_reward_of_a_file_runs_in_the_grader_processes(folder):
    config = Config.model_validate(
        {"rollout": {"custom_rm_path": f"{folder}/my_rewards.py:ends_with_label"}}
    )

    async def grade() -> list[float]:
        grader = make_grader(config)
        try:
            return await grader.grade(Prompt(7, "6 * 7", (1,), label="42", metadata={}), samples())
        finally:
            await grader.close()

    assert asyncio.run(grade()) == [1.02, 1.0, 0.0]


def test_an_advantage_function_of_a_file_is_used_for_each_answer(folder):
    group = SampleGroup(7, tuple(map(ScoredSample, samples(), (1.02, 1.0, 0.0))))
    assert custom_advantages(f"{folder}/my_algorithm.py:above_median", [group], None) == [
        (1.0, 0.0, -1.0)
    ]


def test_a_loss_of_a_file_has_the_policy_gradient_at_the_old_policy(folder):
    path = f"{folder}/my_algorithm.py:squared_ratio"
    options = loss_settings(loss_type="custom_loss", custom_loss_function_path=path)
    logprobs, advantages = torch.tensor([-0.5, -2.0], requires_grad=True), torch.tensor([1.0, -3.0])
    old, nothing, all_of_2 = logprobs.detach(), torch.zeros(2), torch.full((2,), 2.0)
    tokens = Tokens(
        logprobs,
        nothing,
        old,
        old,
        None,
        advantages,
        torch.ones(2),
        all_of_2,
        lambda values: values,
    )
    loss, statistics = loss_function(options)(tokens, options)
    loss.sum().backward()
    assert torch.equal(logprobs.grad, -advantages)
    assert statistics.keys() == {"distance_max"}


@pytest.mark.slow
@pytest.mark.usefixtures("slime_adapters")
def test_plug_ins_of_slime_are_checked_and_run(folder, monkeypatch, capsys):
    """The command of the page, a misspelt import, a wrong number of arguments, the reward and the
    filter.
    """
    page = (ROOT / "docs/extending.md").read_text()
    words = next(
        line
        for line in page.splitlines()
        if line.startswith("`rlpost submit RECIPE --custom-generate")
    )
    words = words.strip("`").split()[3:]
    monkeypatch.chdir(folder)
    assert rlpost(["check", "recipe.toml", *words]) == 0
    text = Path("slime_plugins.py").read_text()
    Path("broken.py").write_text(
        text.replace("import post", "import pots").replace("(args, samples:", "(samples:")
    )
    assert (
        rlpost(
            ["check", "recipe.toml", "--dynamic-sampling-filter-path", "broken.py:not_all_equal"]
        )
        == 2
    )
    errors = capsys.readouterr().err
    assert "rlpost's slime.utils.http_utils has no pots; did you mean 'post'?" in errors
    path = f"{folder}/slime_plugins.py"
    rollout = {"custom_rm_path": f"{path}:reward", "reward_key": "score", "n_samples_per_prompt": 3}
    config = Config.model_validate({"rollout": rollout})

    async def grade() -> list[float]:
        grader = make_grader(config)
        try:
            return await grader.grade(Prompt(7, "6 * 7", (1,), label="42"), samples())
        finally:
            await grader.close()

    rewards = asyncio.run(grade())
    assert rewards == [1.0, 1.0, 0.0]
    wanted = group_filter(f"{path}:not_all_equal", Arguments(settings_of(config)))
    assert wanted(SampleGroup(7, tuple(map(ScoredSample, samples(), rewards))))
    assert not wanted(SampleGroup(7, tuple(map(ScoredSample, samples(), (1.0, 1.0, 1.0)))))


def test_settings_that_name_functions_of_files_are_checked_with_the_rest(
    folder, monkeypatch, capsys
):
    monkeypatch.chdir(folder)
    own = ["--custom-rm-path", "my_rewards.py:ends_with_label", "--loss-type", "custom_loss"]
    own += ["--custom-advantage-function-path", "my_algorithm.py:above_median"]
    assert (
        rlpost(
            [
                "check",
                "recipe.toml",
                *own,
                "--custom-loss-function-path",
                "my_algorithm.py:squared_ratio",
            ]
        )
        == 0
    )
    assert (
        rlpost(
            [
                "check",
                "recipe.toml",
                *own,
                "--custom-loss-function-path",
                "my_algorithm.py:cubed_ratio",
            ]
        )
        == 2
    )
    message = capsys.readouterr().err
    assert "my_algorithm.py:cubed_ratio: the file has no function cubed_ratio" in message
    assert "did you mean 'squared_ratio'? It has above_median" in message


def test_a_cluster_profile_of_a_file_is_in_the_batch_script(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert rlpost(["submit", "recipe.toml", "--cluster", "our-cluster.toml", "--dry-run"]) == 0
    script = capsys.readouterr().out
    for text in (
        "--partition=a100",
        "--account=physics",
        "--gpus-per-node=4",
        "--signal=B:USR2@300",
        "NCCL_DEBUG=WARN",
        "ulimit -Sn 65535",
    ):
        assert text in script


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nowhere:FAMILY", "cannot load it: ModuleNotFoundError"),
        ("json:dumps", "got a function; provide an rlpost.models.family.Family"),
    ],
)
def test_a_package_whose_entry_point_is_no_family_is_named(tmp_path, monkeypatch, value, message):
    """The families of rlpost cannot be replaced."""
    info = tmp_path / "bad-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[rlpost.families]\nBadForCausalLM = {value}\nLlamaForCausalLM = {value}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(WeightError, match=f"rlpost.families BadForCausalLM = {value}: {message}"):
        family("BadForCausalLM")
    with pytest.raises(WeightError, match="known: BadForCausalLM, DeepseekV3ForCausalLM, "):
        family("WorseForCausalLM")
    assert family("LlamaForCausalLM") is FAMILIES["LlamaForCausalLM"]
