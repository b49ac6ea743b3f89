"""The srun that enters a job. Whether it does is held by tests/cluster/test_verbs.py, without containers."""

import subprocess
from pathlib import Path

import pytest

from slurm.container import Container
from slurm.errors import JobError
from slurm.step import Inside, step_argv

RUN, CODE = Path("/runs/a"), Path("/runs/a/code")


def options(argv):
    return {word.partition("=")[0]: word.partition("=")[2] for word in argv if word.startswith("--")}


def test_a_step_names_its_nodes_for_it_would_get_one_otherwise():
    argv = step_argv("5", ["nvidia-smi", "-L"], nodes=["n1", "n2"], inside=Inside(RUN, CODE))
    assert {"--jobid=5", "--overlap", "--nodes=2", "--ntasks=2", "--nodelist=n1,n2", "--label"} <= set(argv)
    assert argv[-3:] == ["--chdir=/runs/a/code", "nvidia-smi", "-L"]
    assert "--label" not in step_argv("5", ["bash"], nodes=["n1"], inside=Inside(RUN, CODE), terminal=True)
    with pytest.raises(JobError):
        step_argv("5", ["bash"], nodes=[], inside=Inside(RUN, CODE))


def test_pyxis_gets_the_name_of_this_start_and_every_mount_in_one_list():
    container = Container("pyxis", "/images/a.sqsh", ("/data", "/scratch:/tmp/s:ro", "/models:ro"))
    found = options(step_argv("5", ["id"], nodes=["n1"], inside=Inside(RUN, CODE, container, 2)))
    assert found["--container-name"] == "rlpost_5_2"
    assert found["--container-mounts"] == (
        "/runs/a:/runs/a,/runs/a/code:/runs/a/code,/data:/data,/scratch:/tmp/s:ro,/models:/models:ro"
    )
    assert found["--container-workdir"] == "/runs/a/code" and "--chdir" not in found
    assert "--no-container-entrypoint" in found and "--container-image" not in found


@pytest.mark.parametrize(("restart", "code"), [(0, 0), (1, 1)])
def test_enroot_is_entered_by_the_process_of_the_container_with_that_name(tmp_path, restart, code):
    """The words after srun's own, run here with a stand-in for enroot that knows one container."""
    (tmp_path / "enroot").write_text(
        "#!/bin/sh\n"
        "case $1 in\n"
        "  list) printf 'NAME PID COMM\\nrlpost_5_0 4242 python\\nrlpost_5_1\\nother 17 sh\\n' ;;\n"
        '  exec) shift; echo "$@" ;;\n'
        "esac\n"
    )
    (tmp_path / "enroot").chmod(0o755)
    inside = Inside(RUN, CODE, Container("enroot", "/images/a.sqsh"), restart)
    argv = step_argv("5", ["echo", "a b"], nodes=["n1"], inside=inside)
    payload = argv[argv.index("bash") :]
    done = subprocess.run(payload, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True)
    assert done.returncode == code
    assert (done.stdout, "no container rlpost_5_1" in done.stderr) == ("" if code else "4242 echo a b\n", bool(code))
