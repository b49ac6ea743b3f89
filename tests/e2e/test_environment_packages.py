"""Environment packages from ``pip install`` to a trained step of the tiny model (--on-demand).

Each package is installed in ``.venv-environments``, into an environment that also sees the packages
of this one; NeMo-Gym, whose servers need Python 3.12 and nothing of the stack, into one for itself.
docs/agents.md has the commands and what they need; ``make test-environments`` runs the tests.
"""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlpost.config.load import files_of, load
from rlpost.extensions.agents.env_names import parse_env
from rlpost.observe.writer import read_metrics
from tests.ports import free_port

pytestmark = pytest.mark.on_demand
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/agents.md").read_text()
VENVS = ROOT / ".venv-environments"
NEMO_GYM = "nemo-gym==0.4.0"
TAU2 = os.environ.get("RLPOST_TAU2", "https://github.com/sierra-research/tau2-bench")
"""Of its repository, or a checkout on this machine."""
SMALL = "jobs/recipes/small/tiny_agents.toml"
DEADLINE_S = 7200.0  # of one command: at load 45 a run was not loaded after half an hour
STARTS = 4
"""Of a NeMo-Gym server, whose Ray ends where a busy machine does not let it start in time."""


@dataclass(frozen=True)
class Package:
    """What is installed, the word of --env, and its arguments.

    ``requirements`` are an extra of setup.cfg or requirements of pip; TAU2 stands for its checkout.
    ``URL`` in word and arguments stands for the address of the NeMo-Gym server ``server``, ``ROWS``
    for its file of example rows.
    """

    requirements: Sequence[str]
    word: str
    args: Mapping[str, Any]
    server: str = ""


VERIFIERS_ON_NEMO_GYM = {
    "config": {
        "taskset": {"dataset": "ROWS", "task": {"resources_url": "URL"}},
        "agent": {"harness": {"id": "null"}},
    }
}
PACKAGES = {
    "gymnasium": Package(["gymnasium"], "gymnasium:FrozenLake-v1", {"tasks": 64}),
    "textarena": Package(["textarena"], "textarena:GuessTheNumber-v0", {"tasks": 64}),
    "reasoning-gym": Package(
        ["reasoning-gym"], "reasoning_gym:leg_counting", {"size": 64, "tag": None}
    ),
    "nemo-gym mcqa": Package([], "nemogym:URL", {"data": "ROWS"}, "mcqa"),
    "nemo-gym gpqa": Package([], "nemogym:URL", {"data": "ROWS"}, "gpqa_diamond"),
    # harnesses of verifiers install their programs with uv
    "verifiers": Package(["verifiers", "uv"], "verifiers:nemo_gym", VERIFIERS_ON_NEMO_GYM, "mcqa"),
    "tau2": Package(["TAU2"], "tau2:mock", {"agent": "llm_agent_solo"}),
}


def checkout_of_tau2() -> Path:
    """Return a checkout of tau2-bench, whose data are in no package."""
    folder = Path(TAU2)
    if not folder.is_dir():
        folder = VENVS / "tau2-bench"
        if not (folder / "data").exists():
            command = ["git", "clone", "-q", "--depth", "1", TAU2, folder]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                pytest.skip(f"git clone {TAU2}: {done.stderr[-1000:]}")
    return folder


def requirements_of(package: Package) -> list[str]:
    """Return requirements of pip, with those of an extra in its place."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    extras = parser["options.extras_require"]
    return [
        line
        for name in package.requirements
        for line in (extras[name].split() if name in extras else [name])
    ]


def install(
    name: str,
    requirements: Sequence[str],
    *,
    python: str,
    sees_stack: bool,
    any_python: bool = False,
) -> Path:
    """Return the Python of an environment with these packages.

    ``any_python``: also if they ask for a newer Python.
    """
    folder, wanted = VENVS / re.sub(r"\W+", "-", name), "\n".join([python, *requirements])
    stamp, executable = folder / ".installed", folder / "bin/python"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        if sees_stack:
            (packages,) = folder.glob("lib/python*/site-packages")
            stack = sysconfig.get_path("purelib")
            (packages / "stack.pth").write_text(f"import site; site.addsitedir({stack!r})\n")
        command = [executable, "-m", "pip", "install", "-q", *requirements]
        environment = {**os.environ, **({"PIP_IGNORE_REQUIRES_PYTHON": "1"} if any_python else {})}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"pip install {' '.join(requirements)}: {done.stderr[-1000:]}")
        stamp.write_text(wanted)
    return executable


def newer_python() -> str | None:
    """Return a Python 3.12 or 3.13 that starts: of PATH, pyenv or uv.

    A name in PATH may be a shim of pyenv, which starts only the versions chosen for this folder.
    """
    home = Path.home()
    pyenv = Path(os.environ.get("PYENV_ROOT", home / ".pyenv"))
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR", home / ".local/share/uv/python"))
    installed = [*pyenv.glob("versions/*/bin"), *uv.glob("*/bin")]
    folders = [*os.environ["PATH"].split(os.pathsep), *map(str, sorted(installed))]
    for name in ("python3.12", "python3.13"):
        for folder in folders:
            executable = shutil.which(name, path=folder)
            if (
                executable
                and subprocess.run([executable, "-V"], capture_output=True).returncode == 0
            ):
                return executable
    return None


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[[str], tuple[str, str]]]:
    """Return a function that starts a server of NeMo-Gym once: its address and its example rows."""
    newer = newer_python()
    processes: list[subprocess.Popen[bytes]] = []
    served: dict[str, tuple[str, str]] = {}

    def start(name: str) -> tuple[str, str]:
        if name in served:
            return served[name]
        if newer is None:
            pytest.skip(
                "nemo-gym needs Python 3.12 or 3.13, and neither PATH, pyenv nor uv has one that "
                "starts: pyenv install 3.12, or uv python install 3.12"
            )
        python = install("nemo-gym", [NEMO_GYM], python=newer, sees_stack=False)
        port = free_port()
        environment = {
            **os.environ,
            "NEMO_GYM_CONFIG_PATH": name,
            "NEMO_GYM_CONFIG_DICT": json.dumps(
                {
                    "head_server": {"host": "127.0.0.1", "port": free_port()},
                    "dry_run": False,
                    name: {
                        "resources_servers": {
                            name: {
                                "entrypoint": "app.py",
                                "domain": "other",
                                "host": "127.0.0.1",
                                "port": port,
                            }
                        }
                    },
                }
            ),
        }
        log = VENVS / f"{name}.log"
        command = [python, "-m", f"resources_servers.{name}.app"]
        url = f"http://127.0.0.1:{port}"
        for _ in range(STARTS):
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    cwd=VENVS,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            processes.append(process)
            if answers(url, process, log):
                break
        else:
            pytest.fail(log.read_text()[-4000:])
        (folder,) = python.parents[1].glob(f"lib/python*/site-packages/resources_servers/{name}")
        served[name] = (url, str(folder / "data/example.jsonl"))
        return served[name]

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def answers(url: str, process: subprocess.Popen[bytes], log: Path) -> bool:
    """Wait until a server answers; False: its own Ray gave up, which it does after 30 s."""
    deadline = time.monotonic() + DEADLINE_S
    while process.poll() is None:
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            time.sleep(0.2)
    assert "timed out during startup" in log.read_text(), log.read_text()[-4000:]
    return False


@pytest.fixture(scope="module")
def model(assets: Path) -> Path:
    """The tiny model with a context for instructions, and a chat template with tools."""
    folder = assets.with_name("tiny-agents")
    words = f"rlpost.extensions.fetching.tiny_model --out {folder} --data {assets} --agents"
    assert words.replace(f"{ROOT}/", "") in PAGE
    subprocess.run([sys.executable, "-m", *words.split()], cwd=ROOT, check=True)
    return folder


def run(command: Sequence[object], log: Path) -> None:
    """Run a command to its end."""
    with log.open("ab") as output:
        done = subprocess.run(
            [str(word) for word in command],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=DEADLINE_S,
        )
    assert done.returncode == 0, log.read_text()[-6000:]


@pytest.mark.parametrize("name", PACKAGES)
def test_an_installed_package_trains_a_step(
    name: str, model: Path, serve: Callable[[str], tuple[str, str]], tmp_path: Path
) -> None:
    package = PACKAGES[name]
    requirements = requirements_of(package)
    python: Path | str = sys.executable
    data_of_tau2: list[str] = []
    if requirements == ["TAU2"]:
        requirements = [str(checkout_of_tau2())]
        data_of_tau2 = [f"TAU2_DATA_DIR={requirements[0]}/data"]
    if requirements:
        # tau2-bench asks for Python 3.12 and runs on 3.11
        any_python = package.requirements == ["TAU2"]
        python = install(
            name, requirements, python=sys.executable, sees_stack=True, any_python=any_python
        )
    url, rows = serve(package.server) if package.server else ("", "")
    word = package.word.replace("URL", url)
    label = parse_env(word).label
    args = json.dumps({label: package.args}).replace("URL", url).replace("ROWS", rows)
    prompts, log, folder = tmp_path / "tasks.jsonl", tmp_path / "log", tmp_path / "run"
    path = f"PATH={Path(python).parent}:{os.environ['PATH']}"
    programs = ["env", path, *data_of_tau2, python, "-m"]
    env = [*("--env", word), *("--env-args", args)]
    export = "rlpost.extensions.agents.environments.export"
    run([*programs, export, word, *env[2:], "--out", prompts], log)
    assert f"rlpost submit {SMALL} --local --env ENV --env-args ARGS" in PAGE
    command = [SMALL, "--local", *env, "--prompt-data", prompts, "--label-key", "none"]
    command += ["--hf-checkpoint", model]
    run([*programs, "rlpost.submit", *command, "--run-folder", folder], log)
    assert parse_env(package.word).kind in PAGE
    line = read_metrics(folder / "metrics.jsonl")[-1]
    config = load(files_of(ROOT / SMALL), {}).config
    assert line["step"] == 1
    assert line[f"env/{label}/episodes"] == config.samples_per_rollout
    assert line["env/episodes_failed"] == line["env/episodes_masked"] == 0.0
    assert line["train/rollout_logprob_abs_diff"] < 1e-4  # the sampled tokens are trained
