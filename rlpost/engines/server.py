"""The process of one engine: ``python -m rlpost.engines.server``.

Input: one line of JSON on standard input, ``{"arguments": {...}, "ready_fd": N, "gpus_per_node":
N, "ignores_term": false, "scratch": FOLDER}``, with the fields of SGLang's ``ServerArgs``.
They include the API key, so it never appears in a command line. Output: the server, and one line on
``ready_fd`` once it answers. At the end ``scratch``, its folder for temporary files, is removed.

Invariants: the server ends when standard input ends, so it never outlives the process that started
it; the key is redacted from the log; settings of the caller take precedence over defaults.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from common.addresses import host_port
from common.cpu_affinity import bind_to_gpus
from common.garbage import paused_for_imports
from common.local_gpus import hidden_gpu_problem
from common.log_format import configure_logging
from rlpost.config.extensions import engine_without_gpus
from rlpost.config.server_arg_values import typed_args
from rlpost.engines import model_module
from rlpost.engines.asgi import App, Receive, Scope, Send, answer_json
from rlpost.engines.blackwell import updatable_kernels
from rlpost.engines.cuda_graphs import graph_settings
from rlpost.engines.engine_activity import EngineActivity
from rlpost.engines.narrow_routes import NarrowRoutes
from rlpost.engines.server_proof import ServerProof
from rlpost.engines.shards.messages import LOADER
from rlpost.errors import ConfigError
from rlpost.models import fp8
from rlpost.models.config_file import read_config
from rlpost.models.model_types import HfConfig
from rlpost.observe.spans import SPANS, clock_and_spans

LISTEN_POLL_S = 0.02
PAUSED_NICENESS = 10
"""Of engines that are paused while a trainer rank computes on the same CPUs: SGLang 0.5.21 polls
without a pause then, and ranks with an optimizer on the host need the cores.
"""
ON_CUDA: Mapping[str, object] = {"dtype": "bfloat16"}
"""That of the trainer; SGLang's own default is float16 for a checkpoint whose dtype is float32 or
missing."""

DEFAULTS: Mapping[str, object] = {
    # With more, the log on the shared file system gets a line for each request: gigabytes in a run.
    "log_level_http": "warning",
    # Requests are token ids of text. Otherwise the processor of images is loaded first.
    "enable_multimodal": False,
    # A weight update sends each rank only what it holds.
    "custom_weight_loader": [LOADER],
}
"""Those of every engine."""


def engine_arguments(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of ServerArgs, from those of the caller and of the device.

    Shared experts that are not in FP8 as the others must not become one of them: SGLang would load
    them into its FP8 weights without an error, and leave their scales as they are. SGLang refuses a
    custom loader beside ``startup_weight_load_mode`` overlap.
    """
    needed: dict[str, object] = {}
    if settings.get("startup_weight_load_mode") == "overlap":
        needed["custom_weight_loader"] = settings.get("custom_weight_loader")
    if fp8.has_other_shared_experts(_hf_config(settings.get("model_path"))):
        needed["disable_shared_experts_fusion"] = True
    return {**DEFAULTS, **settings, **needed}


def not_in_children(fd: int) -> None:
    """Close a file descriptor in every child process, forked or executed."""
    held = [fd]  # close once only: a child may reuse the number for another file
    os.set_inheritable(fd, False)
    os.register_at_fork(after_in_child=lambda: os.close(held.pop()) if held else None)


def end_with_parent(scratch: str = "") -> None:
    """Fork a watcher that kills this process group when standard input, held by the parent, closes.

    Then another process removes the folder ``scratch``. Processes instead of threads, because a
    library may hold Python's global interpreter lock.
    """
    # TERM to all processes of the job must not end the watcher before its parent.
    at_term = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        _remove_later(scratch)
        while os.read(0, 4096):
            pass
        os.killpg(0, signal.SIGKILL)
    signal.signal(signal.SIGTERM, at_term)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _remove_later(folder: str) -> None:
    """Fork a process that removes a folder when this one, which has no children, has ended."""
    ended, held = os.pipe()
    if not folder or os.fork() != 0:
        return
    os.close(held)
    os.setpgid(0, 0)  # the end of the process group must not end it
    os.read(ended, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def redact(secret: str | None) -> None:
    """Redact the secret in all log records of this process; SGLang logs its arguments."""
    if not secret:
        return
    make = logging.getLogRecordFactory()

    def make_without_secret(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        try:
            message = record.getMessage()
        except Exception:  # arguments do not match the format; logging must not raise in the caller
            message = f"{record.msg} (arguments do not match the format)"
            record.msg, record.args = message, ()
        if secret in message:
            record.msg, record.args = message.replace(secret, "***"), ()
        return record

    logging.setLogRecordFactory(make_without_secret)


def engine_on_cuda(
    arguments: Mapping[str, object], capability: tuple[int, int]
) -> dict[str, object]:
    """Prepare this process for SGLang on GPUs; return the fields of ServerArgs."""
    settings = {**ON_CUDA, **arguments}
    graphs = graph_settings(settings, os.environ)
    os.environ.update(graphs.environment)  # SGLang's processes read it at graph capture
    settings |= graphs.server_args
    if settings.get("enable_memory_saver"):
        os.nice(PAUSED_NICENESS)
    hf = _hf_config(settings.get("model_path"))
    return settings | updatable_kernels(settings, hf, capability)


PATH = "/spans"
_UNRECORDED = ("health", "liveness", "readiness", "metrics", "spans")


class RequestSpans:
    """ASGI middleware (asgi.readthedocs.io, version 3) that records each request as a span.

    It answers ``GET /spans?since=S`` with ``clock_and_spans`` of its process; the application has
    checked the API key before.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == PATH:
            await _answer(scope, send)
        else:
            name = scope["path"].strip("/")
            begin = SPANS.now()
            try:
                await self._app(scope, receive, send)
            finally:
                if not name.startswith(_UNRECORDED):
                    SPANS.add(name, begin)


async def _answer(scope: Scope, send: Send) -> None:
    since = float(parse_qs(scope["query_string"].decode()).get("since", ["0"])[0])
    await answer_json(send, clock_and_spans(since))


def run_engine(
    arguments: Mapping[str, Any], ready_fd: int, gpus_per_node: int | None = None
) -> None:
    """Serve until killed; write a line to ``ready_fd`` once requests are accepted.

    A reader of the pipe gets end-of-file if the process ends before. Without CUDA, the slots of a
    node (``gpus_per_node``) share its cores.
    """
    with paused_for_imports():
        import torch

        if torch.cuda.is_available():
            settings = engine_on_cuda(typed_args(arguments), torch.cuda.get_device_capability())
        else:
            problem = hidden_gpu_problem(
                os.environ.get("CUDA_VISIBLE_DEVICES", ""),
                torch_version=torch.__version__,
                torch_cuda=torch.version.cuda,
            )
            if problem is not None:
                raise ConfigError(problem)
            settings = engine_without_gpus()(typed_args(arguments), gpus_per_node)
        architectures = _hf_config(settings.get("model_path")).get("architectures")
        os.environ.update(model_module.environment(architectures, os.environ))
        from sglang.srt.entrypoints.http_server import app, launch_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import ServerArgs
        from sglang.srt.utils import kill_process_tree

        load_plugins()  # as SGLang's command does, because plugins may change settings

    server_args = ServerArgs(**engine_arguments(settings))
    server_args.resolve_once()  # values that follow from others
    app.add_middleware(RequestSpans)
    app.add_middleware(EngineActivity)
    if server_args.api_key:
        address = host_port(server_args.host, server_args.port)
        app.add_middleware(ServerProof, key=server_args.api_key, address=address)
    if server_args.enable_return_routed_experts:
        app.add_middleware(NarrowRoutes)
    try:
        launch_server(
            server_args,
            launch_callback=lambda: say_ready(ready_fd, server_args.host, server_args.port),
            **manager_options(server_args),
            **prepared_processes(server_args.api_key or ""),
        )
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _hf_config(folder: object) -> HfConfig:
    """Return config.json of a folder; empty for a name on the hub, which SGLang looks up itself."""
    is_here = (Path(str(folder)) / "config.json").is_file()
    return read_config(str(folder)) if is_here else {}


def prepared_processes(secret: str) -> dict[str, Any]:
    """Prepare this process; return options of ``launch_server`` that prepare SGLang's others."""
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    from rlpost.engines.engine_processes import Guarded, prepare
    from rlpost.engines.shards.failures import report_flushes, run_scheduler

    prepare(secret)
    report_flushes()
    return {
        "run_scheduler_process_func": Guarded(run_scheduler, secret),
        "run_detokenizer_process_func": Guarded(run_detokenizer_process, secret),
    }


def manager_options(server_args: Any) -> dict[str, Any]:
    """Return the options of ``launch_server`` that choose the tokenizer manager.

    SGLang's own serves adapters that the user passes (--sglang-lora-paths), which requests name.
    """
    if not server_args.enable_lora or server_args.lora_paths:
        return {}
    from rlpost.engines.adapter_use import make_manager

    return {"init_tokenizer_manager_func": make_manager}


def say_ready(ready_fd: int, host: str, port: int) -> None:
    """Write the line once the port accepts connections.

    Without warm-up, SGLang calls back earlier.
    """
    while True:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
        except OSError:
            time.sleep(LISTEN_POLL_S)
        else:
            os.write(ready_fd, b"ready\n")
            return


def read_line(fd: int) -> str:
    """Read one line, unbuffered, so that nothing after it is consumed."""
    line = bytearray()
    while byte := os.read(fd, 1):
        if byte == b"\n":
            break
        line += byte
    return line.decode()


def main(argv: list[str]) -> int:
    """Read the arguments from standard input and run the server."""
    if argv:
        print("usage: python -m rlpost.engines.server < ONE_LINE_OF_JSON", file=sys.stderr)
        return 2
    document = json.loads(read_line(0))
    arguments = document["arguments"]
    if document.get("ignores_term"):
        # Blocked, not ignored: SGLang and uvicorn install their own handlers. Child processes
        # inherit the mask.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ready_fd = int(document["ready_fd"])
    not_in_children(ready_fd)  # end-of-file must mean that this process has ended
    end_with_parent(document.get("scratch", ""))
    redact(arguments.get("api_key"))
    configure_logging()
    if (gpus_per_node := document.get("gpus_per_node")) is not None:
        bind_to_gpus(os.environ.get("CUDA_VISIBLE_DEVICES", ""), gpus_per_node=gpus_per_node)
    run_engine(arguments, ready_fd, gpus_per_node)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
