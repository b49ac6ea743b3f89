"""Tasks in Harbor's format: what they need, their roots and rewards; no sandbox is started."""

from __future__ import annotations

import asyncio
import json
import os
import posixpath
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from rlpost.columns import IntColumn
from rlpost.errors import ConfigError, DataError, GradingLost
from rlpost.extensions.agents.environments.export import main as export
from rlpost.extensions.agents.environments.harbor.check import kind_of
from rlpost.extensions.agents.environments.harbor.check import main as check
from rlpost.extensions.agents.environments.harbor.compose import read_compose
from rlpost.extensions.agents.environments.harbor.fields import FIELDS, resolve
from rlpost.extensions.agents.environments.harbor.rewards import (
    RewardUnreadable,
    chosen,
    rewards_of,
    rewards_of_steps,
)
from rlpost.extensions.agents.environments.harbor.root_definition import TaskFiles
from rlpost.extensions.agents.environments.harbor.roots import (
    ImageDefaults,
    TaskSkipped,
    UploadFailed,
    candidates,
    file_name,
    files_below,
    image_defaults,
)
from rlpost.extensions.agents.environments.harbor.runnable import (
    RunnableTask,
    TrialOptions,
    runnable,
)
from rlpost.extensions.agents.environments.harbor.tasks import (
    TaskUnreadable,
    parse_task,
    read_task,
    task_names,
)
from rlpost.extensions.agents.environments.harbor.trial import Trial, agent_folders
from rlpost.extensions.agents.environments.harbor.verification import declared_files
from rlpost.extensions.agents.environments.of_harbor import HarborEnvironment, command_of, shown
from rlpost.extensions.agents.environments.protocol import Turn
from rlpost.extensions.agents.environments.resumption import resumption_of
from rlpost.extensions.agents.sandbox.archives import Archives
from rlpost.extensions.agents.sandbox.protocol import (
    ArchiveRefused,
    ArchiveStoreFull,
    Ended,
    Limits,
    Result,
    SandboxFileError,
)
from rlpost.types import Prompt
from tests.unit.agents.harbor_tasks import TOML, write_task

NODE = TrialOptions(images={"count": "node", "other": "node"})


def reason_of(folder: Path, options: TrialOptions = NODE, name: str = "count") -> str:
    with pytest.raises(TaskSkipped) as caught:
        runnable(folder, name, options)
    return str(caught.value)


COMPOSE = """\
services:
  main:
    build: {context: "${CONTEXT_DIR}/..", dockerfile: environment/Dockerfile}
    image: ${MAIN_IMAGE_NAME}
    command: ["sh", "-c", "sleep infinity"]
    deploy: {resources: {limits: {cpus: "${CPUS}", memory: "${MEMORY}"}}}
    volumes:
      - ${HOST_VERIFIER_LOGS_PATH}:${ENV_VERIFIER_LOGS_PATH}
      - ${HOST_AGENT_LOGS_PATH}:${ENV_AGENT_LOGS_PATH}
"""


def test_a_compose_file_with_the_service_main_alone_is_a_dockerfile_with_its_context(tmp_path):
    write_task(tmp_path, more={"environment/docker-compose.yaml": COMPOSE})
    assert runnable(tmp_path, "count", NODE)
    assert "-f environment/Dockerfile .`" in reason_of(tmp_path, TrialOptions())
    assert read_compose("services: {main: {build: .}}") == "environment"
    assert read_compose("services: {main: {}}") == "environment"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (COMPOSE + "    privileged: true\n", "main has privileged"),
        (COMPOSE + "  db: {image: postgres}\n", "services has db"),
        (COMPOSE + "      - /home:/home\n", "volumes '/home:/home'"),
        (COMPOSE + "networks: {}\n", "the file has networks"),
        (COMPOSE.replace("sleep infinity", "serve"), "command 'sh -c serve'"),
        (COMPOSE.replace("${MAIN_IMAGE_NAME}", "postgres"), "image 'postgres'"),
        (COMPOSE.replace("${CONTEXT_DIR}/..", "${CONTEXT_DIR}/../.."), "build context"),
        (COMPOSE.replace("${CONTEXT_DIR}/..", "/"), "build context '/'"),
        (COMPOSE.replace("environment/Dockerfile", "../Dockerfile"), "build dockerfile"),
        ("services: {}", "services has no main"),
        ("[" * 50_000, "more than 32 nested values"),
        ("services: [", "no YAML"),
        ("services: 2026-99-99", "no YAML: month must be in 1..12"),
        ("services: {main: {command: [&a [x], *a]}}", "an alias"),
        ("services: {main: {build: [1]}}", "build is no table"),
        ("!!python/object/apply:os.system ['true']", "no YAML"),
        ("a" * 70_000, "more than 64 KiB"),
    ],
)
def test_a_compose_file_that_says_more_is_skipped_with_what_it_says(tmp_path, text, reason):
    write_task(tmp_path, more={"environment/compose.yml": text})
    words = reason_of(tmp_path)
    assert f"it needs Docker Compose (environment/compose.yml: {reason}" in words


def test_a_task_is_read_with_its_times_memory_and_variables(tmp_path):
    more = '[environment.env]\nA = "1"\n[verifier.env]\nKEY = "${MY_KEY}"\n'
    toml = TOML.replace("memory_mb = 256", 'memory = "2G"\ncpus = 1.5')
    write_task(tmp_path, toml=toml + more)
    task = read_task(tmp_path, "count", {"MY_KEY": "k"})
    (step,) = task.steps
    assert (step.agent_seconds, step.verifier_seconds) == (60.0, 20.0)
    assert (task.memory_mib, task.cores, task.root.short) == (2048, 2, "count")
    assert task.root.environment == {"A": "1"} and step.verifier_env == {"KEY": "k"}
    assert task.lacking == () and step.instruction.startswith("Write the number")


def test_the_limits_of_a_sandbox_are_those_of_its_task(tmp_path):
    write_task(tmp_path)
    given = runnable(tmp_path, "count", NODE)
    limits = given.limits(Limits(memory_mib=512, cores=1), given.task.steps[0])
    assert (limits.memory_mib, limits.wall_seconds, limits.network) == (256, 60.0, False)


OFF, SEPARATE = 'network_mode = "no-network"', 'environment_mode = "separate"'
VERIFIER_ROOT = f"[verifier]\n{SEPARATE}\n[verifier.environment]\n"


@pytest.mark.parametrize(
    ("toml", "agent", "verifier"),
    [
        ("", True, True),
        ("[environment]\nallow_internet = false", False, False),
        (f"[environment]\n{OFF}", False, False),
        (f'[environment]\n{OFF}\n[agent]\nnetwork_mode = "public"', True, False),
        (f"[agent]\n{OFF}", False, True),
        (f"{VERIFIER_ROOT}allow_internet = false", True, False),
        (f"[environment]\n{OFF}\n{VERIFIER_ROOT}cpus = 1", False, True),
    ],
)
def test_a_task_that_forbids_the_network_has_none_in_a_pool_with_one(
    tmp_path, toml, agent, verifier
):
    """Else an agent could look its answers up."""
    write_task(tmp_path, toml=toml)
    given = runnable(tmp_path, "count", NODE)
    assert networks(given, Limits(network=True)) == [[agent, verifier]]
    assert networks(given, Limits()) == [[False, False]]
    asked = replace(given, options=replace(NODE, verifier_network=True))
    assert networks(asked, Limits()) == [[False, True]]


def networks(given: RunnableTask, base: Limits) -> list[list[bool]]:
    """Return for each step whether the agent and the verifier have a network."""
    return [
        [given.limits(base, step, for_verifier=who).network for who in (False, True)]
        for step in given.task.steps
    ]


def test_each_step_has_its_own_network(tmp_path):
    """Its sandbox is a fresh one, so a network of the step before is gone."""
    write_steps(tmp_path, STEPS_TOML + f"{OFF}\n")
    assert networks(runnable(tmp_path, "count", NODE), Limits(network=True)) == [
        [True, True],
        [False, True],
    ]
    write_steps(
        tmp_path, STEPS_TOML.replace("timeout_sec = 60.0", OFF) + 'network_mode = "public"\n'
    )
    given = runnable(tmp_path, "count", NODE)
    assert networks(given, Limits(network=True)) == [[False, True], [True, True]]
    assert networks(given, Limits()) == [[False, False], [False, False]]


def test_a_verifier_with_its_own_root_has_its_own_memory_and_cores(tmp_path):
    write_task(
        tmp_path, toml=f"[environment]\nmemory_mb = 256\n{VERIFIER_ROOT}memory_mb = 999\ncpus = 3"
    )
    given = runnable(tmp_path, "count", NODE)
    base = Limits(memory_mib=512, cores=1)
    (step,) = given.task.steps
    limits = given.limits(base, step), given.limits(base, step, for_verifier=True)
    assert [(each.memory_mib, each.cores) for each in limits] == [(256, 1), (999, 3)]


PHASE_VALUES = {
    "timeout_sec": 7.0,
    "user": "ann",
    "network_mode": "no-network",
}
ENVIRONMENT_VALUES = {
    **{"build_timeout_sec": 7.0, "docker_image": "node", "os": "windows", "cpus": 7},
    **{"memory_mb": 7, "gpus": 7, "tpu": {"type": "v6e", "topology": "2x2"}, "memory": "7M"},
    **{"mcp_servers": [{"name": "x"}], "env": {"A": "7"}, "skills_dir": "/skills"},
    **{"healthcheck": {"command": "true"}, "workdir": "/seven", "allow_internet": False},
    "network_mode": "no-network",
}
ACTING = {
    "": {
        "steps": [{"name": "one"}],
        "artifacts": [{"source": "/app/x", "exclude": ["*"]}],
        "multi_step_reward_strategy": "final",
    },
    "agent": PHASE_VALUES,
    "verifier": {
        **PHASE_VALUES,
        "env": {"A": "7"},
        "environment_mode": "separate",
        "collect": [{"command": "true"}],
    },
    "environment": ENVIRONMENT_VALUES,
    "verifier.environment": ENVIRONMENT_VALUES,
    "solution": {"env": {"A": "7"}},
    "steps": {
        **{"name": "two", "min_reward": 7.0, "artifacts": ["/app/x"]},
        "healthcheck": {"command": "test -e /app/x"},
    },
    "steps.agent": PHASE_VALUES,
    "steps.verifier": {
        **PHASE_VALUES,
        "env": {"A": "7"},
        "environment_mode": "separate",
        "collect": [{"command": "true"}],
    },
    "steps.verifier.environment": ENVIRONMENT_VALUES,
    "steps.healthcheck": {
        **{"command": "test -e /app/x", "interval_sec": 7, "timeout_sec": 7, "retries": 7},
        **{"start_period_sec": 7, "start_interval_sec": 7},
    },
}
"""A value of each field that differs from its default."""
WITHOUT_EFFECT = {
    *("schema_version", "version", "task", "metadata", "source"),  # say nothing of the trial
    *("agent", "verifier", "environment", "solution", "verifier.environment"),  # tables
    *("steps.agent", "steps.verifier", "steps.verifier.environment"),
    *("agent.allowed_hosts", "verifier.allowed_hosts"),  # of network_mode = "allowlist" alone,
    *("steps.agent.allowed_hosts", "steps.verifier.allowed_hosts"),  # which is skipped
    *(
        f"{table}.{name}"
        for table in ("environment", "verifier.environment", "steps.verifier.environment")
        for name in (
            *("allowed_hosts", "gpu_types"),  # of gpus, which are skipped
            *("storage_mb", "storage"),  # --sandbox-disk-mib bounds files, in memory
            "build_timeout_sec",  # images are built elsewhere
        )
    ),
}
SHARED = {"environment_mode": "shared"}
DEFAULTS = {"environment_mode": SHARED}


def test_tasks_in_the_older_form_are_named_with_the_command_that_converts_them(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one/task.yaml").write_text("instruction: Do.\n")
    with pytest.raises(DataError, match=r"1 tasks with task.yaml.*`harbor task migrate"):
        task_names(tmp_path)


def test_each_field_of_a_task_acts_or_is_refused():
    """The table of fields is Harbor's; a field of a later Harbor is refused."""
    names = frozenset({"tests/test.sh", "environment/Dockerfile", "tests/Dockerfile"})
    files = TaskFiles({}, {".": "Do.", "steps/one": "Do."}, names=names)

    def parse(table: str, **values: object) -> object:
        separate = {} if "environment_mode" in values else {"environment_mode": "separate"}
        first: dict[str, Any] = {"name": "one", "healthcheck": {"command": "true"}}
        settings = {"verifier": separate, **({"steps": [first]} if "steps" in table else {})}
        place: Any = settings
        for part in table.split(".") if table else ():
            place = first if part == "steps" else place.setdefault(part, {})
        place |= values
        return parse_task("t", Path("t"), replace(files, settings=settings), {})

    for table, known in FIELDS.items():
        for name in (*known, "of_next_year"):
            if f"{table}.{name}".lstrip(".") in WITHOUT_EFFECT:
                continue
            value = 7 if name == "of_next_year" else ACTING[table][name]
            default = DEFAULTS.get(name, {})
            assert parse(table, **{name: value}) != parse(table, **default), (table, name)


@pytest.mark.parametrize(
    ("line", "more", "reason"),
    [
        ("gpus = 2", {}, "2 GPUs"),
        ('os = "windows"', {}, "Windows"),
        ('network_mode = "allowlist"', {}, "a network that reaches listed hosts alone"),
        ('mcp_servers = [{name = "x"}]', {}, "MCP servers"),
        ("memory_mb = 99999", {}, "99999 MiB of memory"),
        ("", {"environment/docker-compose.yaml": "services:"}, "Docker Compose"),
        ("", {"tests/compose.yaml": "services:"}, "Docker Compose (tests/compose.yaml)"),
        ('[environment.env]\nA = "${HOST_KEY}"', {}, "variables of the host (HOST_KEY)"),
        ('[[steps]]\nname = "one"', {}, "step one: steps/one/instruction.md, which is missing"),
        ("", {"trajectory.json": "[]"}, "a conversation before its first turn (trajectory.json)"),
    ],
)
def test_a_task_that_needs_what_a_sandbox_lacks_is_skipped_with_the_reason(
    tmp_path, line, more, reason
):
    toml = TOML.replace("memory_mb = 256\n", "") + line + "\n"
    write_task(tmp_path, toml=toml, more=more)
    assert f"it needs {reason}" in reason_of(tmp_path)


@pytest.mark.parametrize("section", ["agent", "verifier"])
def test_a_task_with_a_second_user_is_skipped(tmp_path, section):
    """Its files may be closed to the agent, which they would not be here."""
    write_task(tmp_path, toml=TOML.replace(f"[{section}]\n", f'[{section}]\nuser = "dev"\n'))
    assert f"a second user for the {section}" in reason_of(tmp_path)
    write_task(tmp_path, toml=TOML.replace(f"[{section}]\n", f'[{section}]\nuser = "root"\n'))
    assert runnable(tmp_path, "count", NODE)


@pytest.mark.parametrize("missing", ["tests/test.sh", "task.toml"])
def test_a_task_without_one_of_its_files_is_named(tmp_path, missing):
    folder = write_task(tmp_path)
    (folder / missing).unlink()
    with pytest.raises((TaskSkipped, TaskUnreadable), match=missing):
        runnable(tmp_path, "count", NODE)


@pytest.mark.parametrize("toml", ["not toml", "agent = 3", "[agent]\ntimeout_sec = -1"])
def test_a_damaged_task_is_unreadable(tmp_path, toml):
    write_task(tmp_path, toml=toml)
    with pytest.raises(TaskUnreadable, match="task count"):
        read_task(tmp_path, "count", {})


def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path):
    write_task(tmp_path / "other")
    (tmp_path / "tasks").mkdir()
    for name in ("../other/count", str(tmp_path / "other/count")):
        with pytest.raises(TaskUnreadable, match="not below"):
            read_task(tmp_path / "tasks", name, {})


def test_tasks_are_found_at_any_depth(tmp_path):
    write_task(tmp_path, "a/one")
    write_task(tmp_path, "two")
    assert task_names(tmp_path) == ("a/one", "two")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no task of Harbor"):
        task_names(tmp_path / "empty")


def test_an_image_is_taken_from_the_first_path_that_exists(tmp_path):
    image = '[environment]\ndocker_image = "org/all:1"\n'
    write_task(tmp_path, toml=TOML.replace("[environment]\n", image))
    both = TrialOptions(images={"org/*": "/images/{name}.sqsh", "*": "/base"})
    assert runnable(tmp_path, "count", both, lambda path: True).root.image == (
        "/images/org+all+1.sqsh"
    )
    assert runnable(tmp_path, "count", both, lambda path: path == "/base").root.image == "/base"
    with pytest.raises(TaskSkipped, match=r"image org/all:1: not at /images/org\+all\+1.sqsh"):
        runnable(tmp_path, "count", both, lambda path: False)
    assert reason_of(tmp_path, TrialOptions()) == (
        "image org/all:1: no path in the argument images"
    )


def test_a_task_with_a_dockerfile_alone_needs_a_root_of_its_name_and_is_told_how_to_build_it(
    tmp_path,
):
    write_task(tmp_path, "set/Count_3")
    images = TrialOptions(images={"*": "/roots/{name}.sqsh"})
    root = runnable(tmp_path, "set/Count_3", images, lambda path: True).root
    image = read_task(tmp_path, "set/Count_3", {}).root.image
    assert root.image == f"/roots/{file_name(image)}.sqsh"
    digest = image.removeprefix("set/Count_3-")
    assert len(digest) == 8
    with pytest.raises(TaskSkipped) as skipped:
        runnable(tmp_path, "set/Count_3", images, lambda path: False)
    assert str(skipped.value) == (
        "environment/Dockerfile describes a root that is not built; build one where Docker and "
        f"enroot are: in the task's folder `docker build -t set-count-3-{digest} -f "
        f"environment/Dockerfile environment` and `enroot import -o /roots/set+Count_3-{digest}.sqsh "
        f"dockerd://set-count-3-{digest}`; image {image}: not at /roots/set+Count_3-{digest}.sqsh"
    )
    (tmp_path / "set/Count_3/environment/Dockerfile").unlink()
    assert "neither names a root" in reason_of(tmp_path, images, "set/Count_3")


@pytest.mark.parametrize("shared", [{"*": "node"}, {"*": "/base"}, {"c*": "/base"}])
def test_the_root_of_a_dockerfile_is_its_own_image_or_one_that_is_named_for_the_task(
    tmp_path, shared
):
    """The steps of the Dockerfile are missing in a root that other tasks share."""
    write_task(tmp_path, toml=SEPARATE, more={"tests/Dockerfile": "FROM other:1\n"})
    reason = reason_of(tmp_path, TrialOptions(images=shared))
    for name in ("count", "count-tests"):
        assert f"that has {{name}} or is that of {name} alone" in reason
    root, of_verifier = roots_of(tmp_path)
    for name in (root, "count"):
        own = {**shared, name: "/own", of_verifier: "node"}
        built = runnable(tmp_path, "count", TrialOptions(images=own), lambda path: True)
        assert (built.root.image, built.verifier_roots[0].image) == ("/own", None)


def roots_of(folder: Path) -> tuple[str, str]:
    """Return the names of the images of the task ``count`` and of its separate verifier."""
    task = read_task(folder, "count", {})
    root = task.steps[0].verifier_root
    assert root is not None
    return task.root.image, root.image


def test_an_edit_of_what_a_dockerfile_copies_gives_another_image(tmp_path):
    folder = write_task(tmp_path, toml=SEPARATE, more={"tests/Dockerfile": "FROM other:1\n"})
    images = set()
    for path in ("solution/solve.sh", "environment/words.txt", "environment/Dockerfile"):
        images.add(roots_of(tmp_path))
        (folder / path).write_text("FROM edited:1\n")
    images.add(roots_of(tmp_path))
    assert len(images) == 3, "the solution is not copied"
    (folder / "environment/words.txt").rename(folder / "environment/other.txt")
    assert read_task(tmp_path, "count", {}).root.image not in dict(images)


SEPARATE = TOML.replace("[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n')


def test_a_separate_verifier_has_a_root_of_its_own_and_gets_declared_files(tmp_path):
    artifacts = 'artifacts = ["/app/out/", {source = "/root/x.json"}]\n'
    write_task(tmp_path, toml=artifacts + SEPARATE, more={"tests/Dockerfile": "FROM other:1\n"})
    task = read_task(tmp_path, "count", {})
    assert task.steps[0].artifacts == ("/logs/artifacts", "/app/out", "/root/x.json")
    options = TrialOptions(images={"count": "/a", "count-tests": "/b"})
    found = runnable(tmp_path, "count", options, lambda path: True)
    (of_verifier,) = found.verifier_roots
    assert (found.root.image, of_verifier.image) == ("/a", "/b")
    assert (found.root.brings_tests, of_verifier.brings_tests) == (False, True)
    missing = reason_of(tmp_path, TrialOptions(images={"count": "node"}))
    assert "-f tests/Dockerfile tests`" in missing and "image count-tests-" in missing


def test_a_separate_verifier_without_a_dockerfile_has_the_root_of_the_agent(tmp_path):
    write_task(tmp_path, toml=SEPARATE)
    found = runnable(tmp_path, "count", NODE)
    assert found.verifier_roots == (found.root,)
    assert found.task.steps[0].artifacts == ("/logs/artifacts",)


@pytest.mark.parametrize(
    "path",
    [
        *(
            "app/x",
            "/",
            "//",
            "/tests/x",
            "/logs/verifier/x",
            "/app/../tests",
            "//tests",
            "/./tests",
        ),
        *(
            "/logs//verifier",
            "/logs/./verifier/x",
            "/logs/.",
            "/logs/home",
            "/proc/1/root",
            "/solution/",
        ),
    ],
)
def test_an_artifact_that_would_reach_the_tests_makes_a_task_unreadable(tmp_path, path):
    write_task(tmp_path, toml=f'artifacts = ["{path}"]\n{SEPARATE}')
    with pytest.raises(TaskUnreadable, match="artifact"):
        read_task(tmp_path, "count", {})


SECRET = "the key of the user"
PARTS = (
    *("instruction.md", "task.toml", "environment", "tests", "solution"),
    *("steps", "steps/one", "steps/one/tests", "steps/one/instruction.md", "steps/one/workdir"),
)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("is_relative", [True, False])
def test_no_link_of_a_task_leads_out_of_its_folder(tmp_path, part, is_relative):
    """A task set that is downloaded keeps its links, and the user's files must not be in prompts."""
    keys = tmp_path / "keys"
    keys.mkdir()
    for name in ("file", "Dockerfile", "test.sh", "solve.sh"):
        (keys / name).write_text(SECRET)
    if part.startswith("steps"):
        task = write_steps(tmp_path / "tasks")
        (task / "steps/one/workdir").mkdir()
    else:
        task = write_task(tmp_path / "tasks", more={"tests/Dockerfile": "FROM x"})
    path, is_file = task / part, (task / part).is_file()
    path.rename(tmp_path / "moved")
    target = keys / "file" if is_file else keys
    steps = "../" * (2 + len(Path(part).parts))
    path.symlink_to(f"{steps}{target.relative_to(tmp_path.parent)}" if is_relative else target)
    assert is_file == path.is_file()
    with pytest.raises(TaskUnreadable, match="not below") as refused:
        runnable(tmp_path / "tasks", "count", NODE)
    assert SECRET not in str(refused.value)
    if not is_file:
        with pytest.raises(UploadFailed, match="not below"):
            files_below(path)
    path.unlink()
    (tmp_path / "moved").rename(task / "inside")  # the same file, below the task's folder
    path.symlink_to(task / "inside")
    if not part.startswith("tests"):
        runnable(tmp_path / "tasks", "count", NODE)


@contextmanager
def nested(*folders: Path) -> Iterator[None]:
    """Give each folder 1,500 in each other; shutil could not remove them either."""
    for folder in folders:
        at = os.open(folder, os.O_RDONLY)
        for _ in range(1500):
            os.mkdir("d", dir_fd=at)
            inner = os.open("d", os.O_RDONLY, dir_fd=at)
            os.close(at)
            at = inner
        os.close(at)
    try:
        yield
    finally:
        subprocess.run(["rm", "-rf", *(folder / "d" for folder in folders)], check=True)


def test_deep_folders_hide_no_other_task_and_make_their_own_unreadable(tmp_path):
    """Python 3.11 lists folders by recursion."""
    tasks = tmp_path / "tasks"
    write_task(tasks, "good")
    deep = write_task(tasks, "deep")
    (tasks / "no_task").mkdir()
    with nested(tasks / "no_task", deep / "environment", deep / "tests"):
        assert task_names(tasks) == ("deep", "good")
        read_task(tasks, "good", {})
        with pytest.raises(TaskUnreadable, match="RecursionError"):
            read_task(tasks, "deep", {})
        with pytest.raises(UploadFailed, match="recursion"):
            files_below(deep / "tests")


def test_links_to_tasks_are_followed_below_the_set_alone(tmp_path):
    elsewhere, tasks = write_task(tmp_path / "elsewhere", "far"), tmp_path / "tasks"
    write_task(tasks / ".all", "near")
    (tasks / "link").symlink_to(tasks / ".all/near")
    (tasks / "loop").symlink_to(tasks)
    (tasks / "far").symlink_to(elsewhere)
    assert len(task_names(tasks)) == 1, "each folder once"
    read_task(tasks, "link", {})
    with pytest.raises(TaskUnreadable, match="not below"):
        read_task(tasks, "far", {})
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "far").symlink_to(elsewhere)
    with pytest.raises(DataError, match="links that lead outside are not followed: far leads to"):
        task_names(alone)


@pytest.mark.parametrize("image", ["..", ".", "", "a/../..", "../../etc", "/", "\0"])
@pytest.mark.parametrize("pattern", ["/images/{name}", "/images/{name}.sqsh"])
def test_no_name_of_an_image_leads_out_of_the_folder_of_images(image, pattern):
    for path in candidates(image, {"*": pattern}):
        assert posixpath.dirname(posixpath.normpath(path)) == "/images"


def test_commands_have_the_variables_and_the_folder_of_the_image():
    environment = 'PATH="/opt/conda/bin:/bin"\nexport LANG=C\n# A=1\nno line\n'
    script = 'mkdir -p "/srv/x" 2> /dev/null\ncd "/srv/x" && unset OLDPWD || exit 1\n'
    defaults = image_defaults(environment, script)
    assert defaults == ImageDefaults({"PATH": "/opt/conda/bin:/bin", "LANG": "C"}, "/srv/x")
    assert image_defaults("", 'cd "$HOME"\nexec "$@"') == ImageDefaults()
    assert defaults.command_env["HOME"] == "/root"
    assert defaults.command_env["PATH"] == "/opt/conda/bin:/bin"


def test_variables_of_the_host_are_replaced():
    assert resolve({"K": "x${N:-1}y"}, {}) == ({"K": "x1y"}, ())
    assert resolve({"K": "${N}"}, {}) == ({"K": ""}, ("N",))


@pytest.mark.parametrize(
    ("text", "is_json", "reward"),
    [
        ("1\n", False, 1.0),
        ("0.25", False, 0.25),
        ('{"reward": 0.5, "other": 1}', True, 0.5),
        ('{"accuracy": 1}', True, 1.0),
        ("0.75", True, 0.75),
        ("true", True, 1.0),
    ],
)
def test_a_reward_is_read_from_the_verifiers_file(text, is_json, reward):
    assert chosen(rewards_of(text, is_json=is_json), "reward") == reward


@pytest.mark.parametrize(
    ("text", "is_json"),
    [
        ("", False),
        ("nan", False),
        ("inf", False),
        ("one", False),
        ("", True),
        ("NaN", True),
        ("[1]", True),
        ('{"a": 1, "b": 2}', True),
        ('{"reward": "1"}', True),
        ("{}", True),
        ("1e999", True),
        ("9" * 400, True),
        ("[" * 200_000, True),
    ],
)
def test_a_file_without_a_finite_reward_is_refused(text, is_json):
    with pytest.raises(RewardUnreadable):
        chosen(rewards_of(text, is_json=is_json), "reward")


def test_a_reward_of_several_is_chosen_by_its_key():
    assert chosen(rewards_of('{"a": 1, "b": 2}', is_json=True), "b") == 2.0


ONE = {"reward": 1.0}
HALF = {"reward": 0.5, "style": 1.0}


@pytest.mark.parametrize(
    ("verified", "least", "mean", "final"),
    [
        ([ONE, HALF], [{}, {}], {"reward": 0.75, "style": 0.5}, HALF),
        ([ONE, HALF, {"reward": 0.0}], [{}] * 3, {"reward": 0.5, "style": 1 / 3}, {"reward": 0.0}),
        ([HALF], [ONE, {}, {}], HALF, HALF),
        ([HALF], [{"speed": 0.0}, {}], HALF, HALF),
        ([ONE], [ONE, {}], {"reward": 0.5}, {}),
        ([ONE, None], [{}, {}, {}], {"reward": 1 / 3}, {}),
        ([None], [{}, {}], {}, {}),
    ],
    ids=[
        *("all", "missing value", "stopped by its reward", "stopped by a missing value"),
        *("the episode ended", "no verdict", "no verdict at all"),
    ],
)
def test_the_reward_of_steps_is_harbors_and_no_policy_gains_by_stopping(
    verified, least, mean, final
):
    """The first four are the results of Harbor 0.26's own functions for the same rewards.

    Harbor leaves out steps without a verdict; here they are 0.
    """
    assert rewards_of_steps(verified, least, "mean", "reward") == pytest.approx(mean)
    assert rewards_of_steps(verified, least, "final", "reward") == final


def test_the_only_value_of_each_step_counts_whatever_its_name():
    """As for a task of one step; ``min_reward`` has the verifier's own names."""
    verified = [{"reward": 1.0}, {"tests": 1.0}]
    assert chosen(rewards_of_steps(verified, [{}, {}], "mean", "reward"), "reward") == 1.0
    stopped = rewards_of_steps([{"tests": 0.5}], [{"tests": 1.0}, {}], "mean", "reward")
    assert chosen(stopped, "reward") == 0.5
    passed = rewards_of_steps([{"tests": 1.0}], [{"tests": 1.0}, {}], "mean", "reward")
    assert chosen(passed, "reward") == 0.5


STEPS_TOML = """\
[agent]
timeout_sec = 60.0
[verifier]
timeout_sec = 20.0
[verifier.env]
A = "task"
B = "task"
[[steps]]
name = "one"
min_reward = {reward = 1.0, style = 0.5}
[steps.verifier.env]
A = "step"
[[steps]]
name = "two"
[steps.agent]
timeout_sec = 7.0
"""


def write_steps(folder: Path, toml: str = STEPS_TOML) -> Path:
    """Write the task ``count`` with the steps one and two."""
    more = {"steps/one/instruction.md": "First.", "steps/two/instruction.md": "Then."}
    more |= {"steps/one/tests/test.sh": "exit 0", "steps/two/workdir/setup.sh": "exit 0"}
    return write_task(folder, toml=toml, solution=None, more=more)


def test_the_steps_of_a_task_have_the_values_of_the_task_and_their_own(tmp_path):
    write_steps(tmp_path)
    (tmp_path / "count/instruction.md").unlink()
    one, two = runnable(tmp_path, "count", NODE).task.steps
    assert (one.instruction, two.instruction) == ("First.", "Then.")
    assert (one.agent_seconds, two.agent_seconds) == (60.0, 7.0)
    assert one.verifier_seconds == 600.0, "as in Harbor, not that of the task"
    assert (one.tests, two.tests) == (("tests", "steps/one/tests"), ("tests",))
    assert (one.workdir, two.workdir, two.has_setup) == (None, "steps/two/workdir", True)
    assert one.verifier_env == {"A": "step", "B": "task"}
    assert one.least == {"reward": 1.0, "style": 0.5} and two.least == {}


@pytest.mark.parametrize(
    "name", ["..", ".", "", "a/b", "/etc", "\x1b]0;OWNED", "a\x00", "ONE", 3, "two\n"]
)
def test_the_name_of_a_step_is_one_name_of_a_folder(tmp_path, name):
    """Names become paths, and are shown."""
    write_steps(tmp_path, STEPS_TOML.replace('"two"', json.dumps(name)))
    with pytest.raises(TaskUnreadable, match=r"step.* name|TOML|path"):
        read_task(tmp_path, "count", {})


def test_steps_that_cannot_be_had_are_refused_by_name(tmp_path):
    text = STEPS_TOML + '[steps.verifier]\nuser = "dev"\n[steps.verifier.environment]\ngpus = 1\n'
    write_steps(tmp_path, text)
    reason = reason_of(tmp_path)
    assert "it needs step two: a second user for the verifier" in reason
    assert "it needs step two: 1 GPUs" in reason and "step one" not in reason


def test_the_verifier_takes_folders_of_the_agent_and_none_of_the_system():
    names = "app/\nbin/\nusr/\ntests/\nlogs/\nroot/\nshared/\nopt/\n.installers/\n$(x)/\n"
    mounts = "1 2 0:1 / / rw - overlay x\n3 1 0:2 / /shared/venv ro - ext4 y\n"
    assert agent_folders(names, mounts, "/app") == ["/app", "/root"]
    assert agent_folders(names, mounts, "/opt/tool") == ["/app", "/opt/tool", "/root"]
    assert agent_folders("app/\n", "", "/") == ["/app"]


def turn(text: str) -> Turn:
    return Turn(0, text, IntColumn(), "stop", "</bash>")


def test_a_command_is_what_follows_the_last_mark():
    assert command_of(turn("I list them.\n<bash>\nls -l\n")) == "ls -l"
    assert command_of(turn("<bash>a</bash> then <bash>b</bash> and more")) == "b"
    assert command_of(turn("<think>no <bash> yet</think>\n<bash>ls")) == "ls"
    assert command_of(turn("<think>I look.\n<bash>ls")) == "ls"  # where the turn stopped
    for text in ("done", "<bash>\n \n", "bash ls", "<think>no <bash> needed</think>done"):
        assert command_of(turn(text)) is None


def test_a_long_output_is_shown_with_its_begin_and_its_end():
    result = Result(Ended.EXITED, 3, b"a" * 50 + b"b" * 50)
    text = shown(result, 10)
    assert f"{'a' * 10}\n[80 characters are left out]\n{'b' * 10}" in text
    assert text.endswith("\n[exit code 3]\n</output>\n")
    assert "[timeout]" in shown(Result(Ended.TIMEOUT, 137), 10)


def test_wrong_arguments_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        HarborEnvironment(str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match=r"has imges; it may have .*images"):
        HarborEnvironment(str(tmp_path), imges={})
    with pytest.raises(ConfigError, match="images of --env-args must be an object"):
        HarborEnvironment(str(tmp_path), images="/x")


@pytest.mark.parametrize("metadata", [{}, {"task": 3}, {"task": "unknown"}])
def test_a_prompt_that_names_no_task_ends_the_run(tmp_path, metadata):
    write_task(tmp_path)
    environment = HarborEnvironment(str(tmp_path), images=NODE.images)
    with pytest.raises(DataError, match="task"):
        asyncio.run(environment.reset(Prompt(0, "x", (1,), metadata=metadata)))


def test_an_interrupted_episode_is_restored(tmp_path):
    assert resumption_of(HarborEnvironment(str(tmp_path))) == "restored"


def test_export_writes_the_tasks_that_run_and_names_the_others(tmp_path, capsys):
    write_task(tmp_path / "tasks")
    write_task(tmp_path / "tasks", "other", toml=TOML + "gpus = 1\n")
    out = tmp_path / "tasks.jsonl"
    arguments = json.dumps({"h": {"images": NODE.images, "shown": 10}})
    assert export([f"h=harbor:{tmp_path}/tasks", "--out", str(out), "--env-args", arguments]) == 0
    (row,) = map(json.loads, out.read_text().splitlines())
    assert (row["env"], row["task"]) == ("h", "count") and "<bash>" in row["prompt"]
    assert "skipped other: it needs 1 GPUs" in capsys.readouterr().err


def test_check_counts_the_tasks_that_run_and_the_reasons(tmp_path, capsys):
    write_task(tmp_path)
    write_task(tmp_path, "other", toml=TOML + "gpus = 1\n")
    assert check([str(tmp_path), "--env-args", json.dumps({"images": NODE.images})]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "other: it needs 1 GPUs" and lines[-1] == "1 of 2 tasks run"
    assert check([str(tmp_path / "missing")]) == 2


def test_check_notes_a_task_that_pays_for_missing_its_min_reward(tmp_path, capsys):
    write_steps(tmp_path)
    arguments = [str(tmp_path), "--env-args", json.dumps({"images": NODE.images})]
    check(arguments)
    assert "count: note: an agent that misses min_reward of one keeps" in capsys.readouterr().out
    write_steps(tmp_path, STEPS_TOML.replace("min_reward = ", "# "))
    check(arguments)
    assert "note:" not in capsys.readouterr().out


def test_reasons_are_counted_without_names(tmp_path):
    write_task(tmp_path, "one")
    write_task(tmp_path, "two")
    kinds = {kind_of(reason_of(tmp_path, TrialOptions(), name)) for name in ("one", "two")}
    assert kinds == {"environment/Dockerfile describes a root that is not built"}


async def test_an_episode_is_lost_when_the_store_is_full_and_scores_0_when_its_files_are_too_large(
    tmp_path, monkeypatch
):
    """Other episodes fill the store, too; the agent alone writes its files."""
    write_task(tmp_path)

    async def refuse(self: Trial) -> None:
        raise errors.pop()

    monkeypatch.setattr(Trial, "save", refuse)
    errors = [ArchiveRefused("too large"), ArchiveStoreFull("full")]
    trial = Trial(runnable(tmp_path, "count", NODE), AsyncMock(), AsyncMock())
    trial._sandbox = AsyncMock()
    with pytest.raises(GradingLost, match="full"):
        await trial.verify()
    trial._sandbox = AsyncMock()
    assert (await trial.verify()).score == 0.0


class FilesOnly:
    """A sandbox with single files, as ``declared_files`` sees it."""

    def __init__(self, **files: bytes) -> None:
        self.files = {f"/{name}": data for name, data in files.items()}

    async def run(self, argv: list[str], cwd: str) -> Result:
        is_there = argv[1] == "-e" and argv[2] in self.files
        return Result(Ended.EXITED, 0 if is_there else 1)

    async def read(self, path: str, *, limit: int) -> bytes:
        if len(self.files[path]) > limit:
            raise SandboxFileError(f"{path}: larger than {limit} bytes")
        return self.files[path]


async def test_single_artifacts_count_towards_the_bound_and_only_missing_ones_are_left_out(
    tmp_path,
):
    archives = Archives(tmp_path, max_mib=1)
    some: Any = FilesOnly(a=bytes(600_000), b=bytes(400_000))
    handed = await declared_files(some, ["/a", "/missing", "/b"], archives)
    assert list(handed.files) == ["/a", "/b"]
    large: Any = FilesOnly(a=bytes(600_000), b=bytes(600_000))
    with pytest.raises(ArchiveRefused, match=r"/b: larger than 448576 .* --sandbox-archive-mib 1"):
        await declared_files(large, ["/a", "/b"], archives)


def sparse(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


@pytest.mark.parametrize(
    ("name", "text", "size", "reason"),
    [
        ("task.toml", "a." * 4_000_000 + "a = 1", 0, "larger than"),
        ("task.toml", "a." * 100_000 + "a = 1", 0, "a line with more than 500 dots"),
        ("environment/disk.img", "", 20 << 30, "20480 MiB, of which the image is built"),
        ("steps/two/instruction.md", "", 20 << 30, "larger than"),
    ],
)
def test_a_task_that_would_take_hours_or_all_memory_is_unreadable(
    tmp_path, name, text, size, reason
):
    """Files of a set need neither disk nor traffic for it: sparse ones, and links to one."""
    folder = write_steps(tmp_path)
    sparse(folder / name, size)
    if text:
        (folder / name).write_text(text)
    with pytest.raises(TaskUnreadable, match=reason):
        read_task(tmp_path, "count", {})


def test_the_instructions_of_all_steps_together_are_bounded(tmp_path):
    names = [f"step{number}" for number in range(20)]
    folder = write_task(tmp_path, toml="".join(f'[[steps]]\nname = "{each}"\n' for each in names))
    (folder / "steps/step0").mkdir(parents=True)
    (folder / "steps/step0/instruction.md").write_text("x" * (1 << 20))
    for each in names[1:]:
        (folder / f"steps/{each}").symlink_to("step0")
    with pytest.raises(TaskUnreadable, match="larger than"):
        read_task(tmp_path, "count", {})


def test_a_file_of_a_task_that_does_not_fit_the_memory_is_not_read(tmp_path):
    sparse(tmp_path / "tests" / "sparse", 20 << 30)
    with pytest.raises(UploadFailed, match="at most 256 MiB"):
        files_below(tmp_path / "tests")
