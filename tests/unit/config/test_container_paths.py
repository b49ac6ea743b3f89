"""What a recipe names must be seen in its container."""

import pytest

from rlpost.config.checks.container import container_problems, interpreter_note
from rlpost.config.load import load


def problems(*mounts, container="pyxis", **groups):
    cluster = {
        "container": container,
        "container_image": "/i.sqsh",
        "container_mounts": list(mounts),
    }
    return container_problems(load([], {"cluster": cluster, **groups}).config)


MODEL = {"checkpoint": {"hf_checkpoint": "/shared/models/m"}}


@pytest.mark.parametrize(
    "mount", ["/shared", "/shared/models:ro", "/shared/models:/shared/models:ro", "/x:/shared"]
)
def test_a_path_below_the_target_of_a_mount_is_seen(mount):
    assert problems(mount, **MODEL) == []


def test_without_a_container_every_path_is_seen():
    assert problems(container="none", **MODEL) == []


@pytest.mark.parametrize("mount", ["/shared/model", "/shared/models/m2", "/other:ro"])
def test_a_path_below_no_mount_is_named_with_the_mounts(mount):
    (problem,) = problems(mount, **MODEL)
    assert "--hf-checkpoint /shared/models/m" in problem and mount in problem


def test_a_folder_that_is_mounted_elsewhere_is_named_with_its_place_inside():
    (problem,) = problems("/shared:/data", **MODEL)
    assert "the folder is /data in the container" in problem


def test_prompts_evaluation_sets_and_options_of_engines_are_looked_at():
    found = problems(
        "/m",
        rollout={"prompt_data": ["/p/a.jsonl"]},
        eval={"eval_prompt_data": ["x", "/e/x.jsonl"]},
        sglang={"sglang_chat_template": "/t/chat.jinja"},
        checkpoint={"save": "/m/save"},
    )
    (problem,) = found
    assert problem.startswith(
        "--prompt-data /p/a.jsonl, --sglang-chat-template /t/chat.jinja and --eval-prompt-data x /e/x.jsonl: not"
    )
    assert problem.endswith("; use --container-mounts /m /p /t /e")


def test_the_run_folder_and_the_code_are_mounted_without_being_listed():
    """A plain batch file mounts the project, where ``make assets`` writes, and its run folder."""
    config = load(
        [], {"cluster": {"container": "pyxis", "container_image": "/i.sqsh"}, **MODEL}
    ).config
    assert container_problems(config, ("/shared", "/runs/a")) == []
    (problem,) = container_problems(config, ("/shared/other", "/runs/a"))
    assert "--hf-checkpoint /shared/models/m" in problem


@pytest.mark.parametrize(
    ("command", "is_named"),
    [("apptainer exec --bind={source}:{target} {image}", True), ("site-wrapper {image}", False)],
)
def test_a_command_that_mounts_nothing_itself_is_not_judged(command, is_named):
    """The configuration of its runtime decides what is visible."""
    cluster = {"container": "command", "container_image": "/i", "container_command": command}
    config = load([], {"cluster": cluster, **MODEL}).config
    assert bool(container_problems(config)) is is_named


def test_a_container_that_the_job_chooses_is_not_judged_before():
    assert problems(container="auto", **MODEL) == []


def test_a_file_of_sets_that_cannot_be_used_does_not_hide_the_rest():
    """It is told with the settings of the evaluation."""
    found = problems("/m", eval={"eval_config": "/m/nowhere.toml"}, **MODEL)
    assert [line.split(" ")[0] for line in found] == ["--hf-checkpoint"]


@pytest.mark.parametrize(
    ("cluster", "is_noted"),
    [
        ({"python": "python3.12"}, True),
        ({"python": "/opt/venv/bin/python"}, False),
        ({"python": "python3.12", "environment": {"PATH": "/opt/venv/bin:/usr/bin:/bin"}}, False),
        ({}, False),
        ({"python": "python3.12", "container": "none"}, False),
    ],
)
def test_an_interpreter_by_name_is_noted_where_the_login_shell_of_a_container_chooses_it(
    cluster, is_noted
):
    values = {"container": "enroot", "container_image": "/i.sqsh", **cluster}
    note = interpreter_note(load([], {"cluster": values}).config)
    assert (note is not None) == is_noted
    if note is not None:
        assert "--python python3.12" in note and "/opt/venv/bin/python" in note
