"""How a command ends for a person, whatever reads its output."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bootstrap.agent.options import parse_options
from bootstrap.agent.ray_command import RayNode, start_argv
from common.attempt import DRIVER_RESTARTS
from common.port_blocks import PortBlock
from rlpost.cli.entry import run_command
from rlpost.cli.job import job_spec
from rlpost.config.load import load

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("words", [["--help"], ["check", "tiny", "--print-config"]])
def test_a_reader_that_has_gone_costs_no_traceback(words):
    """As with ``| head``: the few lines of one are still in the buffer at its end, the many of the
    other are not.
    """
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rlpost", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + 13, "")


def test_a_full_disk_is_named_where_a_copy_was_to_be_written(capsys, tmp_path):
    def copy(_):
        raise OSError(errno.ENOSPC, "No space left on device", "code/a.py", None, str(tmp_path))

    assert run_command(copy, []) == 1
    line = capsys.readouterr().err
    assert line.startswith(f"error: {tmp_path}: No space left") and "code/a.py" not in line


def test_a_file_that_cannot_be_used_is_a_message_and_a_fault_of_ours_is_not(tmp_path, capsys):
    missing = tmp_path / "missing"
    assert run_command(lambda words: len(missing.read_text()), []) == 1
    assert capsys.readouterr().err == f"error: {missing}: No such file or directory\n"

    def fault(words):
        raise OSError("a socket")

    with pytest.raises(OSError, match="a socket"):
        run_command(fault, [])


def test_mounts_and_the_threshold_of_bandwidth_reach_the_agents(tmp_path: Path) -> None:
    cluster = {
        "preflight_bandwidth_gbps": 12.5,
        "container": "pyxis",
        "container_image": "/images/rl.sqsh",
        "container_mounts": ["/data", "/lustre/models:/models:ro"],
    }
    arguments = job_spec(load([], {"cluster": cluster}, base=tmp_path).config).agent_args
    options = parse_options(
        ["--attempt-dir", str(tmp_path), "--num-gpus", "8", *arguments, "--", "driver"]
    )
    assert options.bandwidth_gbps == 12.5
    assert options.needed_paths == (Path("/data"), Path("/models"))


def test_nothing_is_measured_and_no_path_needed_unless_asked_for(tmp_path: Path) -> None:
    arguments = job_spec(load([], {}, base=tmp_path).config).agent_args
    options = parse_options(
        ["--attempt-dir", str(tmp_path), "--num-gpus", "8", *arguments, "--", "driver"]
    )
    assert options.bandwidth_gbps is None and options.needed_paths == ()


def test_every_path_that_the_run_reads_is_looked_for_on_every_node(tmp_path: Path) -> None:
    """If it exists here; a path with a variable is one of another host."""
    for name in ("model", "judge", "ref"):
        (tmp_path / name).mkdir()
    for name in ("prompts.jsonl", "eval.jsonl", "reward.py", "world.py"):
        (tmp_path / name).touch()
    values = {
        "checkpoint": {"hf_checkpoint": "model", "ref_load": "ref", "load": "none-yet"},
        "rollout": {"prompt_data": ["prompts.jsonl@[0:10]", "$RLPOST_NOWHERE/x.jsonl"]},
        "eval": {"eval_prompt_data": ["math", "eval.jsonl"]},
        "engines": {"judge": {"model": "judge"}},
        "env": {"env": [f"{tmp_path}/world.py:World"]},
    }
    values["rollout"]["custom_rm_path"] = f"{tmp_path}/reward.py:score"
    arguments = job_spec(load([], values, base=tmp_path).config).agent_args
    options = parse_options(
        ["--attempt-dir", str(tmp_path), "--num-gpus", "8", *arguments, "--", "driver"]
    )
    names = ("model", "judge", "prompts.jsonl", "eval.jsonl", "ref")
    names += ("world.py", "reward.py")
    assert options.needed_paths == tuple(tmp_path / name for name in names)


def test_restarts_of_the_driver_are_limited_by_the_setting(tmp_path: Path) -> None:
    given = ["--attempt-dir", str(tmp_path), "--num-gpus", "8"]
    for most in (0, DRIVER_RESTARTS):
        settings = load([], {"cluster": {"max_driver_restarts": most}}, base=tmp_path).config
        options = parse_options([*given, *job_spec(settings).agent_args, "--", "driver"])
        assert options.driver_restarts == most


def test_the_dashboard_of_ray_runs_at_the_address_of_the_settings_or_not_at_all(
    tmp_path: Path,
) -> None:
    given = ["--attempt-dir", str(tmp_path), "--num-gpus", "8"]
    ports = PortBlock(20000)
    for cluster, words in (
        ({}, ["--include-dashboard=false", "--dashboard-host=127.0.0.1"]),
        ({"ray_dashboard_host": "::"}, ["--include-dashboard=false", "--dashboard-host=127.0.0.1"]),
        ({"ray_dashboard": True}, ["--include-dashboard=true", "--dashboard-host=127.0.0.1"]),
        (
            {"ray_dashboard": True, "ray_dashboard_host": "::"},
            ["--include-dashboard=true", "--dashboard-host=::"],
        ),
    ):
        settings = load([], {"cluster": cluster}, base=tmp_path).config
        options = parse_options([*given, *job_spec(settings).agent_args, "--", "driver"])
        node = RayNode("a", "a", ports, "/t", 2, 8, dashboard_host=options.ray_dashboard_host)
        assert [word for word in start_argv(node) if word in words] == words
