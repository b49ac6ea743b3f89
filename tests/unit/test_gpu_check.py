"""``make test-gpu`` without a GPU: processes, answers, results.json, and the refusal."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from benchmarks.page import table
from rlpost.config.groups.perf import FP8_ROWS
from rlpost.config.server_arg_values import server_arg_table
from rlpost.config.tree import Config
from rlpost.models.fp8 import grid_of
from rlpost.trainer import fp8_grid
from tests import gpu_check
from tests.gpu.test_benchmarks import (
    train_step_figures,
    train_step_words,
    weight_sync_figures,
    weight_sync_words,
)

ROOT = Path(__file__).parents[2]
READY = {"driver": "570.1", "GPUs": ["H200 150 GB"], "torch": "2.13.0", "CUDA of torch": "13.0"}
READY |= {"GPUs for torch": 1, "nvcc": "13.0"} | dict.fromkeys(gpu_check.PACKAGES, "1.0")


def start(folder: Path, text: str, *options: str) -> subprocess.Popen[str]:
    """Start pytest with the plug-in on a file of tests."""
    (folder / "test_demo.py").write_text(text)
    command = [sys.executable, "-m", "pytest", str(folder / "test_demo.py"), "-c", os.devnull]
    command += ["-p", "tests.gpu_check", "-p", "no:cacheprovider", f"--rootdir={folder}"]
    # no further plug-in, which would take four fifths of the start
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.Popen(
        [*command, f"--gpu-results={folder}", *options],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def answers_of(folder: Path) -> list[dict[str, object]]:
    return json.loads((folder / "results.json").read_text())["answers"]


# --- what is run


def test_the_page_on_gpus_explains_every_check() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/gpu.md").read_text(), re.MULTILINE)
    assert rows == list(gpu_check.ORDER) and set(rows) == set(gpu_check.FILES)


@pytest.mark.parametrize(
    ("memory_gb", "size"), [(None, "tiny"), (24.0, "small"), (85.0, "medium"), (150.0, "large")]
)
def test_the_model_of_the_training_benchmark_fits_the_device(memory_gb, size) -> None:
    words = train_step_words(memory_gb)
    assert words[words.index("--size") + 1] == size


class Parsed(Exception):
    """Raised when a benchmark has parsed its arguments, so that it does not run."""


@pytest.mark.slow
@pytest.mark.parametrize("words_of", [train_step_words, weight_sync_words])
@pytest.mark.parametrize("memory_gb", [None, 24.0, 141.0])
def test_benchmarks_take_the_arguments_that_they_are_given(words_of, memory_gb, monkeypatch):
    name, *words = words_of(memory_gb)
    module = importlib.import_module(name)
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self, arguments=None):
        parse(self, words)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    with pytest.raises(Parsed):
        module.main()


@pytest.mark.slow
def test_engines_of_the_sync_benchmark_run_on_the_gpu_that_their_medium_needs(monkeypatch) -> None:
    """NCCL allows one rank on a GPU, so the engine of a broadcast runs on the second one."""
    bench = importlib.import_module("benchmarks.weight_sync")
    assert [place.media for place in bench.places(0)] == [("broadcast", "memory", "disk")]
    assert [place.media for place in bench.places(1)] == [("memory", "disk")]
    assert [(place.media, place.gpu) for place in bench.places(8)] == [
        (("memory", "disk"), 0),
        (("broadcast",), 1),
    ]
    monkeypatch.setattr(bench, "HAS_CUDA", True)
    settings = bench.Place(("broadcast",), gpu=1).settings
    assert settings["base_gpu_id"] == 1
    assert set(settings) <= server_arg_table().args.keys()


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["ONE_GPU", "TWO_GPUS"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_submit_accepts_the_settings_of_the_checked_runs(tmp_path, capsys, flags, device) -> None:
    from rlpost.submit import main
    from tests.gpu import test_runs

    words = test_runs.submit_words(tmp_path, tmp_path / "run", device, *getattr(test_runs, flags))
    with pytest.raises(SystemExit) as left:
        main([*words[words.index("rlpost.submit") + 1 :], "--print-config"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert ("mem_fraction_static" in shown) == (device == "cuda")


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 3)])
def test_each_fp8_recipe_trains_on_the_gpus_that_have_its_products(monkeypatch, capability) -> None:
    """The check of tests/gpu with CUDA and its ranks faked: each pass gets its settings."""
    from tests.gpu import test_actor

    asked = []

    def run_ranks(_: object, __: int, settings: Config, **___: object) -> list[object]:
        asked.append((settings.megatron.options.get("fp8_recipe"), os.environ.get(fp8_grid.USED)))
        return [{"metrics": [{"train/grad_norm": 1.0}]}]

    monkeypatch.setattr(test_actor, "run_ranks", run_ranks)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    for recipe in FP8_ROWS:
        with contextlib.suppress(pytest.skip.Exception):
            test_actor.test_three_steps_in_fp8_are_close_to_those_in_bfloat16(
                {"qwen3": "/model"}, monkeypatch, "qwen3", recipe
            )
    trained = [recipe for recipe, is_set in asked if recipe and is_set == "1"]
    assert sorted(trained) == sorted(grid_of(capability).trains)
    assert len(asked) == 2 * len(trained), "each beside a pass in bfloat16"


def test_make_passes_its_arguments_to_the_program() -> None:
    # --no-print-directory: these tests may run below another make
    command = ["make", "-n", "--no-print-directory", "test-gpu", "GPU_ARGS=--on-cpu"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    last = re.sub(r"--began \d+ ", "--began S ", output.splitlines()[-1])
    assert last == ".venv/bin/python -m tests.gpu_check --began S --on-cpu"


def section(heading: str) -> str:
    """A section of the page of benchmarks: the real output of a benchmark."""
    text = (ROOT / "docs/benchmarks.md").read_text()
    return re.split(r"^## ", text.partition(f"## {heading}\n")[2], flags=re.MULTILINE)[0]


def test_figures_of_benchmarks_are_read_from_what_they_print() -> None:
    assert re.fullmatch(r"rlpost \d+ tokens/s; TRL GRPOTrainer [\d.]+ x as long; Hugging Face, padded [\d.]+ x as long",
                        train_step_figures(section("Training step")))  # fmt: skip
    updates = weight_sync_figures(section("Weight sync")).split("; ")
    assert len(updates) == 2
    for of_size in updates:
        assert re.match(
            r"\d+ MiB: broadcast [\d.]+ s, [\d.]+ x a plain copy, memory [\d.]+ s", of_size
        )


def test_figures_of_a_gpu_include_the_share_of_its_peak() -> None:
    header = ["step of", "tokens/s", "time, rlpost = 1", "of peak"]
    page = "\n".join(table(header, [["rlpost", "9", "1.00", "41.0 %"]]))
    assert train_step_figures(page) == "rlpost 9 tokens/s, 41.0 % of peak"


# --- answers

DEMO = """
import os, pytest

@pytest.mark.parametrize("number", [1, 2])
def test_numbers_are_small(number, record_property):
    record_property("figure", f"number {number}")

@pytest.mark.parametrize("number", [1, 2])
def test_one_is_missing(number):
    if number == 2:
        pytest.skip("one GPU")

def test_all_are_missing():
    pytest.skip("no second GPU")

def test_a_small_gpu():
    raise RuntimeError("rank 0 failed: torch.OutOfMemoryError: CUDA out of memory. Tried ...")

@pytest.mark.parametrize("number", [1, 2])
def test_two_is_wrong(number):
    assert number == 1, "two is not one"

def test_a_kernel_faults():
    print("the last words")
    os.kill(os.getpid(), 11)

def test_nothing_runs_after_a_fault():
    pass
"""


@pytest.mark.slow
def test_a_function_is_an_answer_with_its_figures_or_its_reason(tmp_path: Path) -> None:
    """Also those of a file whose process a signal ended: the others keep their results."""
    running = start(tmp_path, DEMO)
    output = running.communicate(timeout=60)[0]
    assert running.returncode == 1
    found = [(one["sentence"], one["outcome"], one["note"]) for one in answers_of(tmp_path)]
    assert found[:4] == [
        ("Numbers are small", "passed", "2 of 2; number 1; number 2"),
        ("One is missing", "passed", "1 of 2; 2: one GPU"),
        ("All are missing", "not run", "no second GPU"),
        ("A small gpu", "not run", "too little memory of the GPU for it"),
    ]
    wrong, *after = found[4:]
    assert wrong[:2] == ("Two is wrong", "failed")
    assert wrong[2].startswith("1 of 2; 2: AssertionError: two is not one")
    assert [one[1] for one in after] == ["failed", "failed"]
    assert all(one[2].startswith("ended by SIGSEGV: ") for one in after)
    assert after[0][2].endswith(f"see {tmp_path}/test_demo.log")
    assert re.search(
        r"^passed  Numbers are small: 2 of 2; number 1; number 2 \(demo, ", output, re.M
    )
    assert f"paste into an issue: {tmp_path}/results.json" in output
    assert "\n2 passed, 3 failed, 2 not run\n" in output


@pytest.mark.slow
def test_reports_of_an_earlier_call_are_not_read_again(tmp_path: Path) -> None:
    start(tmp_path, "def test_it(): pass").communicate(timeout=60)
    assert [one["outcome"] for one in answers_of(tmp_path)] == ["passed"]
    start(tmp_path, "import os\ndef test_it(): os._exit(3)").communicate(timeout=60)
    (answer,) = answers_of(tmp_path)
    assert answer["outcome"] == "failed"
    assert str(answer["note"]).startswith("exit code 3")


HANGS = """
import subprocess, sys, time

def test_it():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open("pid", "w").write(str(child.pid))
    time.sleep(600)
"""


def assert_ended(child: int) -> None:
    deadline = time.monotonic() + 5
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child is still there"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_check_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    start(tmp_path, HANGS, "--gpu-limit-s=5").communicate(timeout=60)
    (answer,) = answers_of(tmp_path)
    assert answer["outcome"] == "failed" and str(answer["note"]).startswith("no end after 5 s")
    assert_ended(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_a_terminated_program_ends_its_check_and_shows_the_answers_so_far(tmp_path: Path) -> None:
    """As Slurm does at the end of an allocation."""
    running = start(tmp_path, HANGS)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        running.terminate()
        output = running.communicate(timeout=30)[0]
    finally:
        running.kill()
    assert running.returncode == pytest.ExitCode.INTERRUPTED and "KeyboardInterrupt" in output
    assert answers_of(tmp_path) == []
    assert_ended(int((tmp_path / "pid").read_text()))


# --- the program


def facts(**changes: object) -> dict[str, object]:
    return {**READY, **{name.replace("_", " "): value for name, value in changes.items()}}


@pytest.mark.parametrize(
    ("found", "obstacles"),
    [
        (facts(), []),
        (facts(ray=None), []),
        (facts(driver=None), []),
        (
            facts(driver=None, torch=None, GPUs_for_torch=0),
            ["no NVIDIA driver answers", "torch cannot be imported"],
        ),
        (facts(torch="2.13.0+cpu", CUDA_of_torch=None), ["torch 2.13.0+cpu is built without CUDA"]),
        (facts(GPUs_for_torch=0, ray=None), ["torch 2.13.0 finds no GPU", "ray is not installed"]),
    ],
    ids=[
        "ready",
        "without a package",
        "without nvidia-ml-py",
        "nothing",
        "torch for CPUs",
        "hidden GPUs",
    ],
)
def test_obstacles_to_all_checks_are_named(found, obstacles) -> None:
    assert gpu_check.obstacles_of(found) == obstacles


@pytest.mark.slow
def test_facts_of_this_machine_are_those_of_its_packages() -> None:
    import torch

    found = gpu_check.machine_facts()
    assert found["torch"] == torch.__version__ and found["megatron-core"] is not None
    assert set(READY) <= set(found)


LACKING = facts(driver=None, torch="2.13.0+cpu", GPUs_for_torch=0)


def test_without_a_gpu_one_line_says_what_is_missing_and_the_exit_code_is_2(
    monkeypatch, capsys, tmp_path
) -> None:
    monkeypatch.setattr(gpu_check, "machine_facts", lambda: LACKING)
    assert gpu_check.main(["--out", str(tmp_path / "out")]) == 2
    output = capsys.readouterr()
    assert output.out == "" and not (tmp_path / "out").exists()
    (line,) = output.err.splitlines()
    assert line.startswith("gpu_check: no NVIDIA driver") and "make test-gpu" in line


@pytest.mark.parametrize(("flags", "device"), [([], None), (["--on-cpu"], "cpu")])
def test_chosen_checks_run_on_the_gpu_or_with_a_flag_on_the_cpu(
    monkeypatch, tmp_path, flags, device
) -> None:
    monkeypatch.delenv("RLPOST_GPU_TESTS_ON", raising=False)
    monkeypatch.setattr(gpu_check, "machine_facts", facts)
    calls: list[tuple[list[str], str | None]] = []

    def note(words: list[str]) -> int:
        calls.append((words, os.environ.pop("RLPOST_GPU_TESTS_ON", None)))
        return 0

    monkeypatch.setattr(pytest, "main", note)
    assert gpu_check.main([*flags, "--only", "runs", "memory", "--out", str(tmp_path)]) == 0
    ((words, seen_device),) = calls
    assert words[:2] == [str(ROOT / f"tests/gpu/test_{name}.py") for name in ("runs", "memory")]
    assert f"--gpu-results={tmp_path}" in words and seen_device == device


def test_an_unknown_check_is_refused_with_the_names_of_all(capsys) -> None:
    with pytest.raises(SystemExit) as left:
        gpu_check.main(["--only", "speed"])
    assert left.value.code == 2
    assert "attention_kernels" in capsys.readouterr().err


class Left:
    """Stand-ins of pytest's configuration and of the processes of files."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, takes_s: float) -> None:
        self.now, self.takes_s = 0.0, takes_s
        self.started: list[list[str]] = []
        monkeypatch.setattr(gpu_check.signal, "signal", lambda *_: None)
        monkeypatch.setattr(gpu_check.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(gpu_check.os, "killpg", lambda *_: None)
        monkeypatch.setattr(gpu_check.subprocess, "Popen", self.popen)
        options = {"--gpu-results": folder, "--gpu-minutes": 1.0, "--gpu-limit-s": 1800.0}
        config = SimpleNamespace(getoption=options.get, rootpath=folder)
        self.files = gpu_check.Files(config)  # type: ignore[arg-type]

    def popen(self, command: list[str], **_: object) -> SimpleNamespace:
        self.started.append(command)
        return SimpleNamespace(pid=0, wait=self.wait)

    def wait(self, limit_s: float | None = None) -> int:
        if limit_s is None:
            return -9
        self.now += min(self.takes_s, limit_s)
        if self.takes_s > limit_s:
            raise subprocess.TimeoutExpired("pytest", limit_s)
        return 0

    def ran(self, name: str) -> str:
        """Return how the process of a file ended."""
        path = Path(f"test_{name}.py")
        end = self.files._run(path, [f"{path}::test_it"])
        item = SimpleNamespace(path=path, nodeid=f"{path}::test_it", location=("", 0, ""))
        self.files._ends[path] = end
        return f"{self.files._unfinished(item).outcome}: {end}"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("takes_s", "ends"),
    [
        (20.0, ["failed: exit code 0", "failed: exit code 0"]),  # it has said nothing of its test
        (40.0, ["failed: exit code 0", "skipped: --minutes 1 are over"]),
        (90.0, ["skipped: --minutes 1 are over", "skipped: --minutes 1 are over"]),
    ],
)
def test_what_there_is_no_time_for_is_not_run_and_has_its_command(
    tmp_path, monkeypatch, takes_s, ends
) -> None:
    """No file is begun with less than 30 s; one that the time ends has not failed."""
    left = Left(tmp_path, monkeypatch, takes_s)
    for name, end in zip(("one", "two"), ends, strict=True):
        said = left.ran(name)
        assert said.startswith(end)
        assert "are over" not in said or f"python -m tests.gpu_check --only {name}" in said
    assert len(left.started) == (2 if takes_s == 20.0 else 1)


def test_the_time_of_the_installation_counts_and_a_part_leaves_engines_out(
    monkeypatch, tmp_path
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(gpu_check, "machine_facts", facts)
    monkeypatch.setattr(pytest, "main", lambda words: calls.append(words) or 0)
    monkeypatch.setattr(gpu_check.time, "time", lambda: 1300.0)
    gpu_check.main(["--began", "1000", "--part", "trainer", "--out", str(tmp_path)])
    (words,) = calls
    assert "--gpu-minutes=9.00" in words
    names = [Path(word).stem.removeprefix("test_") for word in words if word.endswith(".py")]
    assert names == [name for name in gpu_check.ORDER if name not in gpu_check.ENGINES]
    assert {*gpu_check.ENGINES, *gpu_check.PROCESSES} <= {*gpu_check.ORDER}
