"""Jobs that do one thing, on a real Slurm: a conversion on two nodes with the real tool, a look
into an image.

The container is that of the stand-ins for pyxis (tests/fakes/bin), in which only the system's
Python is to be found.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slurm.render_once import render_conversion
from slurm.spec import JobSpec
from slurm.states import JobState
from tests.cluster.jobs import job_info, sbatch, until
from tests.cluster.lab import Lab
from tests.cluster.lab_host import search_path
from tests.contract.families import make_family

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]


def convert(lab: Lab, save: Path, model: Path) -> tuple[JobState, str]:
    """Submit a conversion on two nodes and wait for its end; how it ended and what it said."""
    spec = JobSpec(
        job_name="convert",
        nodes=2,
        num_gpus_per_node=1,
        gpu_request="none",
        exclusive=False,
        time="20",
        driver_args=("--hf-checkpoint", str(model)),
        home=str(ROOT),
        python=sys.executable,
        run_folder=str(lab.shared / "run %j"),
        output=str(lab.shared / "convert.out"),
    )
    job = sbatch(lab, "convert.sbatch", render_conversion(spec, str(save)))
    until(lambda: job_info(lab, job).state.is_over, lab, "the conversion is over", deadline_s=400)
    said = [
        path.read_text() for path in (lab.shared / "convert.out", *lab.shared.glob("run*/n*.log"))
    ]
    return job_info(lab, job).state, "\n".join(said)


def test_two_nodes_convert_a_model_which_appears_when_it_is_whole(lab, tmp_path):
    """Layers lie on both nodes; what another job writes is left alone; a second job has nothing to
    do.
    """
    model, save, back = lab.shared / "model", lab.shared / "model_torch_dist", lab.shared / "back"
    make_family(model, "qwen3")
    other = lab.shared / "model_torch_dist.converting-0"
    (other / "release").mkdir(parents=True)
    (other / "release/metadata.json").write_text("of another job")

    state, said = convert(lab, save, model)
    assert state is JobState.COMPLETED and "is written" in said and "by 2 ranks" in said, said
    assert list(lab.shared.glob("*.converting*")) == [other]
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "release"
    words = ["--input-dir", save, "--output-dir", back, "--origin-hf-dir", model]
    lab.run(
        "n01",
        [sys.executable, "tools/convert_torch_dist_to_hf.py", *map(str, words)],
        cwd=ROOT,
        timeout_s=300,
    )
    found, expected = load_file(back / "model.safetensors"), load_file(model / "model.safetensors")
    assert found.keys() == expected.keys() and all(
        found[name].equal(expected[name]) for name in expected
    )

    state, said = convert(lab, save, model)
    assert state is JobState.COMPLETED and "is there; remove it" in said

    state, said = convert(lab, lab.shared / "other", lab.shared / "nowhere")
    assert (
        state is JobState.FAILED
        and f"{lab.shared}/nowhere" in said
        and "not converted (exit" in said
    )
    assert not (lab.shared / "other").exists()


def look(lab: Lab, profile: str) -> tuple[int, dict[str, dict[str, str]], str]:
    """``rlpost doctor --image`` with a profile: exit code, rows by their names, what was said."""
    code = lab.shared / "code"
    # a container shows of the shared folder what is mounted, and the stand-ins mount nothing else
    if not code.exists():
        for name in ("bootstrap", "slurm", "common", "rlpost", "tools"):
            shutil.copytree(ROOT / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
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


@pytest.mark.parametrize("backend", ["pyxis", "enroot"])
def test_a_job_says_what_the_image_of_a_profile_lacks(lab, backend):
    """It runs in the container, with the image's Python and variables, and leaves nothing behind;
    enroot's words and those of setup commands are not among the findings.
    """
    image = lab.shared / "image.sqsh"
    variables = {"PATH": "/usr/bin:/bin", "NCCL_IB_HCA": "the image's"}
    image.write_text("hsqs" + json.dumps({"environment": variables, "hides": str(lab.shared)}))
    code, rows, said = look(
        lab, f"container = '{backend}'\ncontainer_image = '{image}'\nsetup_commands = ['echo up']\n"
    )
    assert code == 1, said
    assert (
        "/usr/bin/python3" in rows["python"]["found"]
        and rows["packages"]["level"] == "FATAL_CONFIG"
    )
    assert (
        "torch==2.13.0" in rows["packages"]["found"]
        and "NCCL_IB_HCA=the image's" in rows["variables"]["found"]
    )
    assert list((lab.shared / "runs").iterdir()) == []


def test_without_a_container_the_job_looks_at_the_node_itself(lab):
    code, rows, said = look(lab, f"python = '{sys.executable}'\n")
    assert code == 0 and rows["packages"]["level"] == "OK", said
