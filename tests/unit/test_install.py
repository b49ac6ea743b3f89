"""``tools/install.sh``: the check of Python's version, and the calls of pip on a machine with GPUs."""

import configparser
import os
import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def test_an_old_python_is_refused_before_anything_is_created(tmp_path):
    """As on a login node; pip would report that no such version of torch exists."""
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.18\n[ "$1" = -V ]\n')
    old.chmod(0o755)
    command = [ROOT / "tools/install.sh", tmp_path / "venv"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHON": str(old)}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"{old} is Python 3.9.18, needed is 3.11 or newer: PYTHON=" in done.stderr
    assert not (tmp_path / "venv").exists()


PYTHON = """#!/bin/sh
echo "$@" >> {folder}/calls
case "$*" in
*tile.txt*) exit {code} ;;
*--compiled*) echo transformer-engine==PINNED ;;
*--no-build-isolation*) exit {code} ;;
esac
"""


@pytest.mark.parametrize(
    ("has_nvcc", "code", "why"),
    [
        (True, 0, None),
        (True, 1, "its compilation failed"),
        (False, 0, "there is no nvcc to compile it"),
    ],
)
def test_with_gpus_transformer_engine_is_compiled_last_and_its_absence_is_reported(
    has_nvcc, code, why, tmp_path
):
    """With a stand-in for pip. Where the compilation fails, everything else is installed."""
    bin_folder, venv = tmp_path / "bin", tmp_path / "venv"
    scripts = {
        bin_folder / "nvidia-smi": "#!/bin/sh\n",
        venv / "bin/pip": "#!/bin/sh\n",
        venv / "bin/python": PYTHON.format(folder=tmp_path, code=code),
    }
    if has_nvcc:
        scripts[bin_folder / "nvcc"] = "#!/bin/sh\n"
    for path, text in scripts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    environ = {"PATH": f"{bin_folder}:/usr/bin:/bin", "CUDA_HOME": str(tmp_path / "nowhere")}
    command = [ROOT / "tools/install.sh", venv]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and (venv / ".installed").exists(), done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    (stack,) = (index for index, call in enumerate(calls) if f"-r {venv}/gpu.txt" in call)
    assert "--require-hashes" in calls[stack]
    lock, tile = (ROOT / "tools/locks/gpu.txt").read_text(), (venv / "tile.txt").read_text()
    assert tile.startswith("cuda-tile==") and "--hash" in tile
    assert (venv / "gpu.txt").read_text() == lock.replace(tile, "")
    assert ("without cuda-tile" in done.stderr) == bool(code)
    compiled = [index for index, call in enumerate(calls) if "--no-build-isolation" in call]
    assert len(compiled) == has_nvcc and all(index > stack for index in compiled)
    if has_nvcc:
        assert (venv / "compiled.txt").read_text() == "transformer-engine==PINNED\n"
    assert (why is None) == ("without TransformerEngine" not in done.stderr)
    assert why is None or why in done.stderr


def write_commands(folder: Path, **texts: str) -> None:
    """Executable files that stand in for commands."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)


def test_the_stamp_says_which_stack_is_there_and_how_transformer_engine_was_compiled(tmp_path):
    """A quick start on the login node is followed by an installation on a GPU node, and back."""
    venv, gpu_node = tmp_path / "venv", tmp_path / "gpu-node"
    python = f"""echo "$*" >> {tmp_path}/calls
case "$*" in *--no-build-isolation*) exit $(cat {tmp_path}/code) ;; esac"""
    write_commands(venv / "bin", pip="", python=python)
    write_commands(gpu_node, nvidia_smi="", nvcc="echo release 12.4")

    def install(*, on_gpu_node: bool, code: int = 0) -> tuple[int, str, str]:
        """Return the exit code, the output, and the calls of Python."""
        (tmp_path / "calls").write_text("")
        (tmp_path / "code").write_text(str(code))
        path = f"{gpu_node}:/usr/bin:/bin" if on_gpu_node else "/usr/bin:/bin"
        done = subprocess.run(
            [ROOT / "tools/install.sh", venv],
            env={"PATH": path, "CUDA_HOME": str(tmp_path / "nowhere")},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr, (tmp_path / "calls").read_text()

    assert "locks/cpu.txt" in install(on_gpu_node=False)[2]
    assert install(on_gpu_node=False) == (0, "", "")
    code, said, calls = install(on_gpu_node=True, code=1)
    assert code == 0 and "has the stack for CPUs; the GPU stack replaces it" in said
    assert "/gpu.txt" in calls and "its compilation failed" in said
    assert install(on_gpu_node=True) == (0, "", ""), "not tried again with the same compiler"
    write_commands(gpu_node, nvcc="echo release 13.0")
    assert "--no-build-isolation" in install(on_gpu_node=True)[2]
    write_commands(gpu_node, nvcc="echo release 13.1")
    assert install(on_gpu_node=True) == (0, "", ""), "it is compiled"
    assert install(on_gpu_node=False) == (0, "", ""), "the login node uses the GPU stack"
    stamp = venv / ".installed"
    stamp.write_text(stamp.read_text().replace(stamp.read_text()[:8], "00000000"))
    code, said, calls = install(on_gpu_node=False)
    assert code == 1 and "run make install on a node with a GPU" in said and not calls


def test_an_old_c_library_is_refused_before_anything_is_created(tmp_path):
    write_commands(tmp_path / "bin", getconf="echo glibc 2.28")
    done = subprocess.run(
        [ROOT / "tools/install.sh", tmp_path / "venv"],
        env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and not (tmp_path / "venv").exists()
    assert "glibc 2.28 here, SGLang's wheels need 2.34 or newer: use the container" in done.stderr


@pytest.mark.parametrize(
    ("lock", "extras"), [("cpu.txt", ("cpu", "dev")), ("gpu.txt", ("gpu", "dev"))]
)
def test_every_requirement_is_locked_with_hashes(lock, extras):
    """Run ``make lock`` after a change to setup.cfg."""
    locked = {}
    for block in re.split(r"\n(?=\S)", (ROOT / "tools/locks" / lock).read_text()):
        name, version = re.match(r"([a-zA-Z0-9._-]+)==([^ ;\\]+)", block).groups()
        locked.setdefault(canonicalize_name(name), set()).add(version)
        assert "--hash=sha256:" in block, name
    for requirement in requirements(extras):
        name = canonicalize_name(requirement.name)
        if (lock, name) == ("cpu.txt", "torch"):
            continue  # installed first, from the index of the machine
        assert name in locked, f"{requirement}: not in tools/locks/{lock}; make lock"
        assert any(version in requirement.specifier for version in locked[name]), requirement


def requirements(extras):
    """The requirements of setup.cfg for these extras, with those they include."""
    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg")
    for extra in extras:
        for line in options["options.extras_require"][extra].splitlines():
            if line.strip() and not line.startswith("#"):
                yield Requirement(line)
    for line in options["options"]["install_requires"].splitlines():
        if line.strip():
            yield Requirement(line)


def test_the_compiler_that_pip_brings_is_of_torch_s_cuda():
    """CUB refuses a compiler of another version than its headers, which are torch's."""
    lock = (ROOT / "tools/locks/gpu.txt").read_text()
    cuda = re.search(r"^cuda-toolkit==(\d+\.\d+)\.", lock, re.MULTILINE)[1]
    for name in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl"):
        (version,) = re.findall(rf"^{name}==(\S+)", lock, re.MULTILINE)
        assert version.startswith(f"{cuda}."), name


def test_an_installation_says_that_it_works_while_pip_is_quiet(tmp_path):
    """pip's stand-in ends once the line is there; so do the lines with the installation."""
    venv, out = tmp_path / "venv", tmp_path / "out"
    wait = f"#!/bin/sh\nuntil grep -q 'so far' {out}; do sleep 0.05; done\n"
    for name, text in {"pip": "#!/bin/sh\n", "python": wait}.items():
        path = venv / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    environ = {**os.environ, "PATH": "/usr/bin:/bin", "RLPOST_PROGRESS_S": "0.05"}
    with out.open("w") as file:
        command = [ROOT / "tools/install.sh", venv]
        subprocess.run(command, env=environ, stdout=file, check=True, timeout=60)
    said = out.read_text().splitlines()
    assert "usually 2 to 5 minutes" in next(line for line in said if "so far" in line)
    assert said[-1] == f"install: done, {venv}"
