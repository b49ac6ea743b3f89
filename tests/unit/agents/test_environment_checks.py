"""Problems with --env are reported on the login node, without importing an environment."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from rlpost.cli.check_settings import check
from rlpost.cli.job import job_spec
from rlpost.config.checks.container import container_problems
from rlpost.config.load import load
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.extensions.agents.checks import agent_problems, uses_sandboxes
from rlpost.extensions.agents.environments import make
from rlpost.extensions.agents.environments.make import make_environments

CODE = """\
raise SystemExit("not to be run")
class Good:
    def reset(self, prompt): ...
    async def step(self, turn, extra=None): ...
class Harness:
    async def run(self, episode): ...
class Neither:
    def go(self): ...
class Wrong:
    def reset(self): ...
    def step(self, turn, more): ...
class Inherits(Good):
    pass
"""
IMPORTS = """\
import rlpost.compat.slime.sample
from rlpost.tasks import judge
from rlpost.extensions.agents.environments.protocol import Step
try:
    import rlpost.gone
except ImportError:
    pass
class Old:
    def reset(self, prompt):
        from rlpost.agents.environments.protocol import Step
    def step(self, turn):
        import rlpost.unknown
        from rlpost.types import Sample, Unknown
"""


def config(*env: str, **settings: Any) -> Config:
    groups: dict[str, dict[str, Any]] = {"env": {"env": list(env)}}
    for key, value in settings.items():
        table, _, name = key.partition("__")
        groups.setdefault(table, {})[name] = value
    return load([], groups).config


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(CODE)
    return f"{tmp_path}/mine.py"


@pytest.mark.parametrize("name", ["Good", "Harness", "Inherits"])
def test_a_class_with_the_interface_is_accepted(mine: str, name: str) -> None:
    assert agent_problems(config(f"{mine}:{name}")) == []


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Goood", "the file has no class Goood; did you mean 'Good'?"),
        ("Neither", "the class has neither reset and step nor run; it has go"),
        ("Wrong", "reset takes 1 arguments; write def reset(self, prompt)"),
        ("Wrong", "step takes 3 arguments; write def step(self, turn)"),
    ],
)
def test_a_class_without_the_interface_is_refused(mine: str, name: str, told: str) -> None:
    found = agent_problems(config(f"{mine}:{name}"))
    assert any(told in line and line.startswith(f"--env {mine}:{name}") for line in found), found


def test_imports_of_modules_of_rlpost_that_have_another_name_are_named(tmp_path: Path) -> None:
    """The file would fail on the node alone."""
    (tmp_path / "old.py").write_text(IMPORTS)
    lines = agent_problems(config(f"{tmp_path}/old.py:Old"))
    assert [line.partition(": line ")[2] for line in lines] == [
        "1: rlpost has no module rlpost.compat.slime.sample; use rlpost.extensions.slime.sample",
        "2: rlpost has no module rlpost.tasks.judge; use rlpost.extensions.judge",
        "10: rlpost has no module rlpost.agents.environments.protocol; use "
        "rlpost.extensions.agents.environments.protocol",
        "12: rlpost has no module rlpost.unknown; docs/api.md lists the names",
        "13: rlpost has no name rlpost.types.Unknown; docs/api.md lists the names",
    ]


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("class A(:\n")
    assert "no such file" in agent_problems(config(f"{tmp_path}/gone.py:A"))[0]
    assert "not valid Python" in agent_problems(config(f"{tmp_path}/broken.py:A"))[0]
    assert agent_problems(config("package.of_the_nodes:A")) == []


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("verifiers:wordle", "pip install 'rlpost[verifiers]'"),
        ("openenv:http://n1:8000", "pip install 'rlpost[openenv]'"),
        ("tau2:airline", "git+https://github.com/sierra-research/tau2-bench"),
    ],
)
def test_a_missing_adapter_is_reported_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, word: str, told: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (line,) = agent_problems(config(word))
    assert line.startswith(f"--env {word}: ") and told in line
    in_image = {"cluster__container": "enroot", "cluster__container_image": "image.sqsh"}
    assert agent_problems(config(word, **in_image)) == [], "the image may have it"


def test_tasks_of_harbor_and_addresses_of_nemo_gym_need_no_package(tmp_path: Path) -> None:
    assert agent_problems(config(f"harbor:{tmp_path}", "nemogym:http://n1:8000")) == []
    assert uses_sandboxes(config(f"harbor:{tmp_path}"))
    assert not uses_sandboxes(config("nemogym:http://n1:8000"))
    for word, told in (
        (f"harbor:{tmp_path}/gone", "no such folder"),
        ("nemogym:n1:8000", "not an address; write nemogym:http://HOST:PORT"),
    ):
        (line,) = agent_problems(config(word))
        assert line.startswith(f"--env {word}: ") and told in line
    arguments = {"h": {"shown": 9, "images": {}, "offline": True}}
    (line,) = agent_problems(config(f"h=harbor:{tmp_path}", env__env_args=arguments))
    assert "offline of --env-args: gone: build an image" in line


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"env__env_weights": [1.0, 2.0]}, "2 weights for 1 --env"),
        ({"env__env_args": {"Goood": {}}}, "no environment has the label Goood"),
        ({"env__env_args": {"Good": 3}}, "write an object for each label"),
        (
            {"env__env_args": {"Good": {"k": ["${API_KEY}"]}}},
            "set API_KEY_ENGINES_KEY and name that",
        ),
        ({"env__env_args": {"Good": {"k": "${HF_TOKEN}"}}}, "names ${HF_TOKEN}: an environment"),
        ({"rollout__custom_generate_function_path": "a.b"}, "both write the answers"),
        ({"rollout__group_rm": True, "rollout__custom_rm_path": "a.b"}, "--group-rm false"),
        ({"env__env_reward": "turn", "grpo__advantage_estimator": "rloo"}, "--env-reward turn"),
        ({"env__env_reward": "turn", "grpo__kl_coef": 0.1}, "--kl-loss-coef"),
        (
            {"env__env_reward": "turn", "grpo__custom_reward_post_process_path": "a.b"},
            "--custom-reward-post-process-path a.b does not return",
        ),
    ],
)
def test_settings_that_conflict_are_problems(
    mine: str, settings: dict[str, Any], told: str
) -> None:
    (line,) = agent_problems(config(f"{mine}:Good", **settings))
    assert told in line


def test_lengths_are_punished_only_where_a_length_ends_the_answer(mine: str) -> None:
    overlong = {"grpo__overlong_buffer_len": 8}
    for word in (f"{mine}:Harness", "nemogym:http://n1:8000"):
        (line,) = agent_problems(config(word, **overlong))
        assert line.startswith(f"--overlong-buffer-len 8 with --env {word}: ")
    assert agent_problems(config(f"{mine}:Good", **overlong)) == []


def test_the_check_of_a_run_includes_its_environments() -> None:
    with pytest.raises(ConfigError, match="--env wordle: names no environment"):
        check(config("wordle"))


def test_arguments_reach_the_environment_and_wrong_ones_are_reported_before_the_run() -> None:
    word = "guess=rlpost.extensions.agents.examples.guess:Guess"
    environments, gateway = make_environments(config(word, env__env_args={"guess": {"turns": 2}}))
    assert environments.labels == ("guess",) and gateway is None
    with pytest.raises(ConfigError, match=r"--env guess=.*unexpected keyword argument 'turn'"):
        make_environments(config(word, env__env_args={"guess": {"turn": 2}}))
    with pytest.raises(ConfigError, match="has neither reset and step nor run"):
        make_environments(config("collections:OrderedDict"))
    for name in ("A_ENGINES_KEY", "HF_TOKEN"):
        with pytest.raises(
            ConfigError, match=f"--env-args of guess name ..{name}., which this run"
        ):
            make_environments(config(word, env__env_args={"guess": {"turns": f"${{{name}}}"}}))
    with pytest.raises(ConfigError, match="has no function Gues"):
        make_environments(config("rlpost.extensions.agents.examples.guess:Gues"))


def test_the_gateway_gets_the_settings_of_the_engines(monkeypatch) -> None:
    """A refusal by the engines would end the run."""
    seen: dict[str, object] = {}
    monkeypatch.setattr(make, "Gateway", lambda folder, **given: seen.update(given) or seen)
    monkeypatch.setattr(make, "HarnessRunner", lambda *given, **named: None)
    word = f"{Path(__file__)}:Asks"
    make_environments(config(word, sglang__sglang_context_length=512))
    assert seen["server_args"] == {"context_length": 512}


class Asks:
    """A harness."""

    async def run(self, episode: object) -> float:
        return 0.0


def test_the_file_of_a_class_is_found_from_any_folder_and_in_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    given = config(
        *("mine.py:Good", "two=mine.py:Harness", "pkg.mod:Class", "tau2:mock"),
        *("harbor:tasks", "h=harbor:tasks"),
    )
    assert given.env.env == (
        f"{tmp_path}/mine.py:Good",
        f"two={tmp_path}/mine.py:Harness",
        "pkg.mod:Class",
        "tau2:mock",
        f"harbor:{tmp_path}/tasks",
        f"h=harbor:{tmp_path}/tasks",
    )
    in_image = {"cluster__container": "enroot", "cluster__container_image": "/image.sqsh"}
    inside = config("two=mine.py:Good", **in_image)
    (line,) = [each for each in container_problems(inside, ()) if "--env" in each]
    assert f"--env {tmp_path}/mine.py" in line and "--container-mounts" in line
    tasks = config("h=harbor:tasks", **in_image)
    (line,) = [each for each in container_problems(tasks, ()) if "--env" in each]
    assert f"--env {tmp_path}/tasks" in line


SHELLS = """\
raise SystemExit("not to be run")
class Shell:
    uses_sandboxes: bool = True
class Child(Shell): ...
class Loop(Loop): ...
class Plain:
    uses_sandboxes = False
"""


@pytest.mark.parametrize(
    ("name", "used"), [("Shell", True), ("Child", True), ("Plain", False), ("Loop", False)]
)
def test_a_class_that_uses_sandboxes_is_found_without_running_its_file(
    tmp_path: Path, name: str, used: bool
) -> None:
    (tmp_path / "mine.py").write_text(SHELLS)
    assert uses_sandboxes(config(f"{tmp_path}/mine.py:{name}")) is used


def test_the_agents_of_a_run_check_what_its_sandboxes_need() -> None:
    shell = "rlpost.extensions.agents.examples.shell:Shell"
    assert "--sandboxes" in job_spec(config(f"label={shell}")).agent_args
    elsewhere = config(shell, sandbox__sandbox_backend="slurm")
    for other in (config(), config("rlpost.extensions.agents.examples.guess:Guess"), elsewhere):
        assert "--sandboxes" not in job_spec(other).agent_args
