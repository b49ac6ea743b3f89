"""One-shot jobs on real Slurm: ``rlpost convert`` on two nodes, and ``rlpost doctor --image``.

The conversion is a real one: torchrun, Megatron-core over gloo. The containers are those of the
stand-ins for pyxis and enroot (tests/fakes/bin), which have the system's Python only.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slurm.render import render_conversion
from slurm.states import JobState
from tests.cluster.jobs import job_info, sbatch, until
from tests.cluster.lab import Lab
from tests.cluster.lab_host import search_path
from tests.gpu.models import make_gpu_model
from tests.settings import a_job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]


RECIPE = """\
[cluster]
job_name = 'test'
nodes = 4
num_gpus_per_node = 1
[checkpoint]
hf_checkpoint = '{folder}/tiny'
ref_load = '{folder}/tiny_torch_dist'
"""


def convert(lab: Lab, folder: Path) -> tuple[JobState, str]:
    """Run ``rlpost convert`` on two nodes; how its job ended, and its output."""
    words = ["convert", "tiny.toml", "--nodes", "2", "--time", "10"]
    argv = [sys.executable, "-m", "rlpost", *words]
    env = {"PYTHONPATH": str(ROOT)}
    out = lab.run("ctl", argv, cwd=folder, env=env, timeout_s=120).stdout
    job, run = re.search(r"submitted (\d+)\nrun folder (\S+)", out).groups()
    until(lambda: job_info(lab, job).state.is_over, lab, "the conversion is over", deadline_s=240)
    logs = [path.read_text() for path in Path(folder, run).glob("*.[lo][ou][gt]")]
    return job_info(lab, job).state, "\n".join(logs)


def test_two_nodes_convert_a_model_which_appears_when_it_is_complete(lab):
    """Each node has half of the layers. The folder in which another job writes is left alone, and
    a second job finds nothing to do.
    """
    folder = lab.shared / "converted"
    make_gpu_model(folder / "tiny")
    (folder / "tiny.toml").write_text(RECIPE.format(folder=folder))
    other = folder / "tiny_torch_dist.converting-0"
    (other / "release").mkdir(parents=True)
    (other / "release/metadata.json").write_text("of another job")

    state, logs = convert(lab, folder)
    assert state is JobState.COMPLETED and "is written" in logs and "by 2 ranks" in logs, logs
    assert list(folder.glob("*.converting*")) == [other]
    target = folder / "tiny_torch_dist"
    assert (target / "latest_checkpointed_iteration.txt").read_text() == "release"
    written = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    back = ["--input-dir", str(target), "--output-dir", str(folder / "back")]
    tool = [sys.executable, "-m", "rlpost", "convert", "to-hf", *back, "--origin-hf-dir", "tiny"]
    lab.run("ctl", tool, cwd=folder, env={"PYTHONPATH": str(ROOT)}, timeout_s=240)
    found, expected = (load_file(folder / one / "model.safetensors") for one in ("back", "tiny"))
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not found[name].equal(expected[name])]

    state, logs = convert(lab, folder)
    assert state is JobState.COMPLETED and "is there; remove it" in logs, logs
    assert written == {path: path.stat().st_mtime_ns for path in target.rglob("*")}


def test_a_conversion_that_fails_leaves_no_folder(lab):
    source, save = lab.shared / "nowhere", lab.shared / "other"
    spec = a_job(
        job_name="convert",
        nodes=1,
        num_gpus_per_node=1,
        gpu_request="none",
        exclusive=False,
        time="20",
        driver_args=("to-torch-dist", "--hf-checkpoint", str(source)),
        home=str(ROOT),
        python=sys.executable,
        run_folder=str(lab.shared / "run dir"),
        output=str(lab.shared / "convert.out"),
    )
    job = sbatch(lab, "convert.sbatch", render_conversion(spec, str(save)))
    until(lambda: job_info(lab, job).state.is_over, lab, "the conversion is over", deadline_s=400)
    # the log ends in the name of the node
    paths = [lab.shared / "convert.out", *lab.shared.glob("run */n*.log")]
    logs = "\n".join(path.read_text() for path in paths)
    assert job_info(lab, job).state is JobState.FAILED
    assert str(source) in logs and "not converted (exit" in logs
    assert not list(lab.shared.glob("other*"))


def examine(lab: Lab, profile: str) -> tuple[int, dict[str, dict[str, str]], str]:
    """``rlpost doctor --image`` with a profile: exit code, rows by name, output."""
    code = lab.shared / "code"
    # The stand-in containers hide the shared folder except for what is mounted, so the code must
    # be a copy inside it. With its compiled modules: the copies keep the times that those record.
    if not code.exists():
        for name in ("bootstrap", "slurm", "common", "rlpost", "tools"):
            shutil.copytree(ROOT / name, code / name)
        shutil.copy(ROOT / "setup.cfg", code)
    path = lab.shared / "profile.toml"
    path.write_text(f"[cluster]\nruns_dir = '{lab.shared}/runs'\ngpu_request = 'none'\n{profile}")
    command = [
        sys.executable,
        "-m",
        "rlpost",
        "doctor",
        "--image",
        "--cluster",
        str(path),
        "--cpu",
        "--json",
    ]
    environ = {"PATH": f"{ROOT}/tests/fakes/bin:{search_path()}"}
    done = lab.run("ctl", command, cwd=code, env=environ, check=False, timeout_s=200)
    rows = json.loads(done.stdout or "[]")
    return done.returncode, {row["name"]: row for row in rows}, done.stdout + done.stderr


COMMAND = "container_command = 'apptainer exec --bind={source}:{target}:{mode} {image}'\n"


@pytest.mark.parametrize("backend", ["pyxis", "enroot", "command"])
def test_a_job_reports_what_the_image_of_a_profile_lacks(lab, backend):
    """It runs in the container, with the image's Python and variables, and leaves nothing behind.
    The output of enroot and of setup commands is not among the findings.
    """
    image = lab.shared / "image.sqsh"
    variables = {"PATH": "/usr/bin:/bin", "NCCL_IB_HCA": "the image's"}
    image.write_text("hsqs" + json.dumps({"environment": variables, "hides": str(lab.shared)}))
    code, rows, output = examine(
        lab,
        f"container = '{backend}'\ncontainer_image = '{image}'\nsetup_commands = ['echo up']\n"
        + (COMMAND if backend == "command" else ""),
    )
    assert code == 1, output
    assert "/usr/bin/python3" in rows["python"]["found"]
    assert rows["packages"]["level"] == "FATAL_CONFIG"
    assert "torch==2.13.0" in rows["packages"]["found"]
    assert "NCCL_IB_HCA=the image's" in rows["variables"]["found"]
    assert list((lab.shared / "runs").iterdir()) == []


def test_without_a_container_the_job_examines_the_node_itself(lab):
    code, rows, output = examine(lab, f"python = '{sys.executable}'\n")
    assert code == 0 and rows["packages"]["level"] == "OK", output
