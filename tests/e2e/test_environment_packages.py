"""Environment packages from ``pip install`` to a trained step of the tiny model (--on-demand).

Each package is installed in ``.venv-environments``, into an environment that also sees the packages
of this one; NeMo-Gym, whose servers need Python 3.12 and nothing of the stack, into one for itself.
docs/agents.md has the commands and what they need; ``make test-environments`` runs the tests.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlpost.extensions.agents.env_names import parse_env
from rlpost.observe.writer import read_metrics
from tests.e2e.runs import RECIPE
from tests.ports import free_port

pytestmark = pytest.mark.on_demand
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/agents.md").read_text()
VENVS = ROOT / ".venv-environments"
NEMO_GYM = "nemo-gym==0.4.0"
TAU2 = os.environ.get("RLPOST_TAU2", "git+https://github.com/sierra-research/tau2-bench")
BATCH, SAMPLES = 4, 4
LONGEST = 4096  # tokens: of the tiny model, rules of games have more than its 512 characters
DEADLINE_S = 1800.0
SETTINGS = {
    "--num-rollout": "1",
    "--rollout-batch-size": f"{BATCH}",
    "--n-samples-per-prompt": f"{SAMPLES}",
    "--rollout-max-response-len": "8",
    "--env-max-turns": "3",
    "--actor-num-gpus-per-node": "1",
    "--tensor-model-parallel-size": "1",
    "--sequence-parallel": "false",
    "--rollout-num-gpus": "1",
    "--eval-interval": "none",
    "--save-interval": "none",
    "--sglang-max-total-tokens": f"{8 * LONGEST}",
    "--max-tokens-per-gpu": f"{BATCH * LONGEST}",
}


@dataclass(frozen=True)
class Package:
    """What is installed, the word of --env, and its arguments.

    ``requirements`` are an extra of setup.cfg or requirements of pip. ``URL`` in word and arguments
    stands for the address of the NeMo-Gym server ``server``, ``ROWS`` for its file of example rows.
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
    # without tools, which the chat template of the tiny model does not have
    "nemo-gym mcqa": Package([], "nemogym:URL", {"data": "ROWS"}, "mcqa"),
    "nemo-gym gpqa": Package([], "nemogym:URL", {"data": "ROWS"}, "gpqa_diamond"),
    # harnesses of verifiers install their programs with uv
    "verifiers": Package(["verifiers", "uv"], "verifiers:nemo_gym", VERIFIERS_ON_NEMO_GYM, "mcqa"),
    "tau2": Package([f"tau2 @ {TAU2}"], "tau2:mock", {"agent": "llm_agent_solo"}),
}


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


def install(name: str, requirements: Sequence[str], *, python: str, sees_stack: bool) -> Path:
    """Return the Python of an environment with these packages."""
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
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"pip install {' '.join(requirements)}: {done.stderr[-1000:]}")
        stamp.write_text(wanted)
    return executable


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[[str], tuple[str, str]]]:
    """Return a function that starts a server of NeMo-Gym once: its address and its example rows."""
    newer = next(filter(None, map(shutil.which, ("python3.12", "python3.13"))), None)
    processes: list[subprocess.Popen[bytes]] = []
    served: dict[str, tuple[str, str]] = {}

    def start(name: str) -> tuple[str, str]:
        if name in served:
            return served[name]
        if newer is None:
            pytest.skip("NeMo-Gym needs Python 3.12 or newer")
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
        url = f"http://127.0.0.1:{port}"
        until_answers(url, process, log)
        (folder,) = python.parents[1].glob(f"lib/python*/site-packages/resources_servers/{name}")
        served[name] = (url, str(folder / "data/example.jsonl"))
        return served[name]

    yield start
    for process in processes:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def until_answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)


@pytest.fixture(scope="module")
def model(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a longer context."""
    folder = shutil.copytree(assets, tmp_path_factory.mktemp("model") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = LONGEST
    (folder / "config.json").write_text(json.dumps(config))
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
    if name == "tau2" and "TAU2_DATA_DIR" not in os.environ:
        pytest.skip("set TAU2_DATA_DIR to the folder data of a checkout of tau2-bench")
    requirements = requirements_of(package)
    python: Path | str = sys.executable
    if requirements:
        python = install(name, requirements, python=sys.executable, sees_stack=True)
    url, rows = serve(package.server) if package.server else ("", "")
    word = package.word.replace("URL", url)
    label = parse_env(word).label
    args = json.dumps({label: package.args}).replace("URL", url).replace("ROWS", rows)
    prompts, log, folder = tmp_path / "tasks.jsonl", tmp_path / "log", tmp_path / "run"
    programs = ["env", f"PATH={Path(python).parent}:{os.environ['PATH']}", python, "-m"]
    env = [*("--env", word), *("--env-args", args)]
    export = "rlpost.extensions.agents.environments.export"
    run([*programs, export, word, *env[2:], "--out", prompts], log)
    data = ["--prompt-data", prompts, "--input-key", "prompt", "--label-key", "none"]
    settings = [part for pair in SETTINGS.items() for part in pair]
    folders = ["--hf-checkpoint", model, "--run-folder", folder]
    run(
        [*programs, "rlpost.submit", RECIPE, "--local", *env, *data, *settings, *folders],
        log,
    )
    assert parse_env(package.word).kind in PAGE
    line = read_metrics(folder / "metrics.jsonl")[-1]
    assert line["step"] == 1
    assert line[f"env/{label}/episodes"] == BATCH * SAMPLES
    assert line["env/episodes_failed"] == line["env/episodes_masked"] == 0.0
    assert line["train/rollout_logprob_abs_diff"] < 1e-4  # the sampled tokens are trained
