"""rlpost.train as the agent starts it: how the driver's end reaches the log and the agent."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from common.cluster import Cluster
from common.exit_codes import EXIT_CONFIG, EXIT_CRASHED
from common.run_folder import create_run_folder
from rlpost import train
from rlpost.config.load import dump, load
from rlpost.driver import driver
from tests.unit.cli.projects import make_project


@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        FileNotFoundError(2, "none", "words"),
        MemoryError(),
    ],
)
def test_an_error_that_nobody_expects_is_a_crash_and_told_with_its_place(
    tmp_path, monkeypatch, caplog, error
):
    """On a login node the first is a reader that has gone, the second a file of the person's: there
    a line, or none. The agent starts a driver that crashed again.
    """

    def broken(config, run, cluster):
        raise error

    run = create_run_folder(tmp_path / "run", dump(load([], {}).config))
    monkeypatch.setattr(train, "check_installed", lambda config: None)
    monkeypatch.setattr(driver, "drive", broken)
    monkeypatch.setattr(Cluster, "from_json", lambda line: None)
    monkeypatch.setattr("sys.stdin", io.StringIO("{}\n"))
    assert train.main(["--cluster-from-stdin", "--run-folder", str(run.root)]) == EXIT_CRASHED
    assert caplog.records[-1].exc_info is not None and caplog.records[-1].exc_info[1] is error


@pytest.mark.parametrize("chosen", ["pyxis", "none"])
def test_in_a_job_what_the_batch_script_mounts_is_there(tmp_path, monkeypatch, capsys, chosen):
    """A plain batch file mounts the project's folder, where ``make assets`` writes; it tells what
    it has chosen.
    """
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    driven = []
    monkeypatch.setattr(train, "check_installed", lambda config: None)
    monkeypatch.setattr(driver, "drive", lambda config, run, cluster: driven.append(config) or 0)
    monkeypatch.setattr(Cluster, "from_json", lambda line: None)
    monkeypatch.setattr("sys.stdin", io.StringIO("{}\n"))
    monkeypatch.setenv("RLPOST_CONTAINER", chosen)
    container = ["--container", "auto", "--container-image", "/i.sqsh"]
    words = ["recipe.toml", *container, "--cluster-from-stdin"]
    if chosen == "pyxis":
        assert train.main([*words, "--run-folder", "run"]) == EXIT_CONFIG
        assert "not visible in the container" in capsys.readouterr().err
    monkeypatch.setenv("RLPOST_HOME", str(tmp_path))
    assert train.main([*words, "--run-folder", "run"]) == 0
    assert [config.cluster.container for config in driven] == [chosen]


def test_the_command_line_that_wandb_records_has_no_secret(monkeypatch):
    words, parsed = ["--environment", "A=secret", "--lr", "1e-6"], []

    def record(act, arguments):
        parsed.extend(arguments)
        return 0

    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    monkeypatch.setattr(train, "run_command", record)
    assert train.main() == 0 and parsed == words
    assert sys.argv[1:] == ["--environment", "A=***", "--lr", "1e-6"]
