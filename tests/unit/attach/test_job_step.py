"""The srun command that adds a step to a job. tests/cluster/test_verbs.py runs it without
containers.
"""

from pathlib import Path

import pytest

from rlpost.extensions.attach.job_step import Inside, step_argv
from slurm.container import Container
from slurm.errors import JobError

RUN, CODE = Path("/runs/a"), Path("/runs/a/code")


def options(argv):
    return {
        word.partition("=")[0]: word.partition("=")[2] for word in argv if word.startswith("--")
    }


def test_a_step_names_its_nodes_for_it_would_get_one_otherwise():
    argv = step_argv("5", ["nvidia-smi", "-L"], nodes=["n1", "n2"], inside=Inside(RUN, CODE))
    assert {
        "--jobid=5",
        "--overlap",
        "--nodes=2",
        "--ntasks=2",
        "--nodelist=n1,n2",
        "--label",
    } <= set(argv)
    assert argv[-3:] == ["--chdir=/runs/a/code", "nvidia-smi", "-L"]
    assert "--label" not in step_argv(
        "5", ["bash"], nodes=["n1"], inside=Inside(RUN, CODE), terminal=True
    )
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


@pytest.mark.parametrize("backend", [None, "pyxis", "enroot"])
def test_a_step_has_the_variables_of_the_agents_whatever_the_image_sets(backend):
    """With env inside the container: pyxis and enroot exec override srun's variables."""
    container = Container(backend, "/images/a.sqsh") if backend else None
    inside = Inside(RUN, CODE, container, 1, (("RAY_AUTH_MODE", "token"), ("A", "x y")))
    argv = step_argv("5", ["ray", "status"], nodes=["n1"], inside=inside)
    assert argv[-5:] == ["env", "RAY_AUTH_MODE=token", "A=x y", "ray", "status"]


def test_enroot_is_entered_on_the_node_by_the_name_of_this_start():
    """The script of the run's code adds the node to the name (test_enroot.py)."""
    inside = Inside(RUN, CODE, Container("enroot", "/images/a.sqsh"), 1)
    argv = step_argv("5", ["echo", "a b"], nodes=["n1"], inside=inside)
    assert argv[-4:] == ["exec", "rlpost_5_1", "echo", "a b"]
    assert argv[-7:-4] == ["python3", "-I", "/runs/a/code/slurm/enroot.py"]
