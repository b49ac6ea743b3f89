"""Servers: settings are checked by name, keys stay secret, and no server outlives its parent."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlpost.config.server_arg_values import server_arg_table, typed_args
from rlpost.engines import process, server
from rlpost.engines.cuda_graphs import graph_settings
from rlpost.engines.engine import Engine
from rlpost.engines.engine_client import EngineClient
from rlpost.engines.server_args import check_server_args
from rlpost.errors import ConfigError, EngineDied, RolloutError
from tests.ports import free_port

KEY = "k-5f0e9a"


def test_settings_of_the_caller_override_defaults() -> None:
    given = {"model_path": "m", "max_running_requests": 3}
    assert server.engine_arguments(given) == {**given, **server.DEFAULTS}
    own: dict[str, object] = {"log_level_http": "info", "enable_multimodal": True}
    own |= {"custom_weight_loader": ["mine.load"]}
    assert server.engine_arguments(own) == own


@pytest.mark.parametrize("saves_memory", [False, True])
def test_an_engine_on_gpus_has_the_dtype_of_the_trainer_and_yields_where_it_shares_cpus(
    saves_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    niceness: list[int] = []
    monkeypatch.setattr(os, "nice", niceness.append)
    given = {"model_path": "m", "enable_memory_saver": saves_memory}
    settings = server.engine_on_cuda(given, (9, 0))
    graphs = graph_settings({**given, "dtype": "bfloat16"}, {})
    assert settings == {**given, "dtype": "bfloat16", **graphs.server_args}
    assert graphs.environment.items() <= os.environ.items()
    assert niceness == ([server.PAUSED_NICENESS] if saves_memory else [])
    assert server.engine_on_cuda({**given, "dtype": "float16"}, (9, 0))["dtype"] == "float16"


def test_an_engine_that_loads_while_it_captures_graphs_has_no_loader_of_slices() -> None:
    """SGLang refuses the two together (``StartupWeightLoadManager``)."""
    mode: dict[str, object] = {"startup_weight_load_mode": "overlap"}
    assert server.engine_arguments(mode)["custom_weight_loader"] is None
    own: dict[str, object] = {**mode, "custom_weight_loader": ["mine.load"]}
    assert server.engine_arguments(own)["custom_weight_loader"] == ["mine.load"]


@pytest.mark.parametrize(("kept", "is_apart"), [("mlp.shared_experts.up_proj", True), ("x", False)])
def test_shared_experts_in_another_precision_stay_apart(tmp_path, kept, is_apart) -> None:
    """tests/contract/forked/test_engine_parameters.py loads such folders into SGLang's models."""
    quantised = {"quant_method": "fp8", "modules_to_not_convert": [f"model.layers.3.{kept}"]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantised}))
    args = server.engine_arguments({"model_path": str(tmp_path)})
    assert args.get("disable_shared_experts_fusion", False) is is_apart


def test_settings_of_sglang_are_known_without_importing_it() -> None:
    assert {"mem_fraction_static", "attention_backend"} <= server_arg_table().args.keys()
    program = (
        "import sys; from rlpost.engines.server_args import check_server_args; "
        "check_server_args({'mem_fraction_static': 0.5}); assert not {'sglang', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("mem_fraction_statik", "did you mean '--sglang-mem-fraction-static'"),
        ("api_key", "follows from the secret"),
        ("tp_size", "follows from --rollout-num-gpus-per-engine"),
        ("zzzzzzzzz", "no setting 'zzzzzzzzz'"),
    ],
)
def test_a_wrong_setting_is_named(name: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        check_server_args({"mem_fraction_static": 0.5, name: 1})


def test_the_key_is_redacted_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    make = logging.getLogRecordFactory()
    try:
        server.redact(KEY)
        logging.getLogger("any").warning("arguments %s", {"api_key": KEY})
        logging.getLogger("any").warning(f"of 100% {KEY}")
        logging.getLogger("any").warning("%d engines", KEY)
    finally:
        logging.setLogRecordFactory(make)
    assert KEY not in caplog.text
    assert caplog.messages == [
        "arguments {'api_key': '***'}",
        "of 100% ***",
        "%d engines (arguments do not match the format)",
    ]


def test_a_server_that_cannot_start_reports_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    settings = {"no_such_setting": 1}
    engine = Engine(model_path="m", api_key=KEY, server_args=settings, log_path=log)
    with pytest.raises(EngineDied) as error:
        engine.start("127.0.0.1", free_port(), deadline_s=120)
    assert "no_such_setting" in str(error.value), "the end of the log is part of the message"
    assert engine.url in str(error.value)
    assert "exit code 1" in str(error.value)
    assert KEY not in str(error.value) and KEY not in log.read_text()
    assert not engine.alive()
    assert oct(log.stat().st_mode)[-3:] == "600"


def test_an_engine_that_is_late_is_stopped(tmp_path: Path) -> None:
    engine = Engine(model_path="m", api_key=KEY, server_args={}, log_path=tmp_path / "engine.log")
    with pytest.raises(RolloutError, match="not ready after 0 s"):
        engine.start("127.0.0.1", free_port(), deadline_s=0.0)
    assert not engine.alive()


def test_user_provided_adapters_are_left_to_sglang() -> None:
    own = SimpleNamespace(enable_lora=True, lora_paths=["math=/adapters/math"])
    assert server.manager_options(own) == {}
    assert server.manager_options(SimpleNamespace(enable_lora=None, lora_paths=None)) == {}


def test_settings_of_older_recipes_are_renamed_for_the_installed_sglang():
    """Recipes may use ``--sglang-cuda-graph-bs``, and single values where SGLang wants lists."""
    check_server_args({"cuda_graph_bs": [1, 2, 4]})
    assert typed_args({"cuda_graph_bs": [1, 2, 4], "tp_size": 2}) == {
        "cuda_graph_bs_decode": [1, 2, 4],
        "tp_size": 2,
    }
    assert typed_args({"cuda_graph_bs": 8}) == {"cuda_graph_bs_decode": [8]}
    assert (
        typed_args({"lora_target_modules": "q_proj", "log_level": "error"})["log_level"] == "error"
    )


def test_an_engine_that_breaks_off_an_answer_is_reported() -> None:
    """It raises an error of the HTTP client, not an OSError."""

    def half(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        answering = threading.Thread(target=half, args=(listening,))
        answering.start()
        client = EngineClient(f"http://127.0.0.1:{listening.getsockname()[1]}", KEY)
        with pytest.raises(RolloutError, match=r"engine .*GET /server_info failed: .*payload"):
            asyncio.run(client.server_info())
        answering.join()


def test_a_process_that_survives_a_kill_is_named_after_a_deadline(
    tmp_path: Path, monkeypatch: Any
) -> None:
    server_process = process.ServerProcess("engine x", tmp_path / "log")
    server_process.spawn({})
    with monkeypatch.context() as patched:
        patched.setattr(process, "KILL_WAIT_S", 0.05)
        patched.setattr(process.os, "killpg", lambda group, number: None)
        with pytest.raises(
            RolloutError, match=rf"engine x: process {server_process.pid} is still there"
        ):
            server_process.stop()
    server_process.stop()
    assert not server_process.alive()


SERVER = """
import multiprocessing, os, signal, sys, time
from rlpost.engines import server
from rlpost.engines.cuda_graphs import graph_settings

def run(arguments, ready_fd, gpus_per_node):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(9))  # as SGLang and uvicorn do
    scheduler = multiprocessing.get_context("fork").Process(target=wait)
    scheduler.start()
    os.write(ready_fd, b"%d\\n" % scheduler.pid)
    wait()

def wait():
    # A handler runs between two calls: a signal just before a long sleep would wait for its end.
    for _ in range(1200):
        time.sleep(0.05)

server.run_engine = run
server.main([])
"""


@pytest.mark.parametrize("ignores_term", [True, False])
def test_term_to_every_process_of_a_step_does_not_end_a_server_that_ignores_it(ignores_term):
    ours, theirs = os.pipe()
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        pass_fds=(theirs,),
        start_new_session=True,
    )
    os.close(theirs)
    document = {"arguments": {}, "ready_fd": theirs, "ignores_term": ignores_term}
    server.stdin.write(json.dumps(document).encode() + b"\n")
    server.stdin.flush()
    scheduler = int(os.read(ours, 64))
    os.killpg(server.pid, signal.SIGTERM)
    if ignores_term:
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(0.5)
        os.kill(scheduler, 0)
        server.stdin.close()  # as when its agent ends; the server must end too
    assert server.wait(60) != 0
    os.close(ours)


def test_two_threads_may_stop_a_process_at_once(tmp_path: Path, monkeypatch: Any) -> None:
    """The thread that waits for startup notices the end of the process, and stops it as well."""
    server_process = process.ServerProcess("engine x", tmp_path / "log")
    server_process.spawn({})
    both, wait_exit = threading.Barrier(2), server_process.wait_exit

    def wait_for_the_other(timeout_s: float) -> bool:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        return wait_exit(timeout_s)

    monkeypatch.setattr(server_process, "wait_exit", wait_for_the_other)
    with ThreadPoolExecutor(2) as pool:
        stopping = [pool.submit(server_process.stop) for _ in range(2)]
    assert [each.exception() for each in stopping] == [None, None]
    assert not server_process.alive()
