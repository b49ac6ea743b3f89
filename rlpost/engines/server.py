"""The process of one engine: ``python -m rlpost.engines.server``.

Input: one line of JSON on standard input, ``{"arguments": {...}, "ready_fd": N, "gpus_per_node":
N, "ignores_term": false, "scratch": FOLDER}``, with the fields of SGLang's ``ServerArgs``.
They include the API key, so it never appears in a command line. Output: the server, and one line on
``ready_fd`` once it answers. At the end ``scratch``, its folder for temporary files, is removed.

Invariants: the server ends when standard input ends, so it never outlives the process that started
it; the key is redacted from the log; without CUDA the engine uses the stand-ins of
``sglang_on_cpu`` and settings that run on CPU; settings of the caller take precedence.
"""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import platform
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import psutil

from common.addresses import host_port
from common.cpu_affinity import bind_to_gpus, num_cores, read_siblings
from common.garbage import paused_for_imports
from common.local_gpus import hidden_gpu_problem
from common.log_format import configure_logging
from rlpost.config.server_arg_values import typed_args
from rlpost.engines.asgi import App, Receive, Scope, Send, answer_json
from rlpost.engines.blackwell import updatable_kernels
from rlpost.engines.cpu_memory import memory_fraction
from rlpost.engines.cuda_graphs import graph_settings
from rlpost.engines.engine_activity import EngineActivity
from rlpost.engines.narrow_routes import NarrowRoutes
from rlpost.engines.server_proof import ServerProof
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
STAND_INS = Path(__file__).with_name("sglang_on_cpu")
WITHOUT_CUDA: Mapping[str, object] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "lora_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "disable_custom_all_reduce": True,
    "skip_server_warmup": True,
    "sleep_on_idle": True,  # an idle scheduler would spin on a core that the trainer needs
    "max_total_tokens": 16384,
    "max_running_requests": 64,
    # A forward pass on a CPU beside other load may take longer than SGLang's 300 s, after which its
    # scheduler ends itself.
    "watchdog_timeout": 1800.0,
}

ON_CUDA: Mapping[str, object] = {"dtype": "bfloat16"}
"""That of the trainer; SGLang's own default is float16 for a checkpoint whose dtype is float32 or
missing."""

DEFAULTS: Mapping[str, object] = {
    # With more, the log on the shared file system gets a line for each request: gigabytes in a run.
    "log_level_http": "warning",
    # Requests are token ids of text. Otherwise the processor of images is loaded first.
    "enable_multimodal": False,
}
"""Those of every engine."""

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h of glibc
ONLY_ON_CUDA: Mapping[str, object] = {
    "enable_memory_saver": False,
    # The plain-torch attention and experts of SGLang support tensor parallelism only.
    "enable_dp_attention": False,
    "enable_dp_lm_head": False,
    "dp_size": 1,
    "ep_size": 1,
    "moe_dense_tp_size": None,
}


def engine_arguments(given: Mapping[str, object], *, has_cuda: bool) -> dict[str, object]:
    """Return the fields of ServerArgs.

    The given values override the defaults; without CUDA, settings that need it are reset. Shared
    experts that are not in FP8 as the others must not become one of them: SGLang would load them
    into its FP8 weights without an error, and leave their scales as they are.
    """
    needed: dict[str, object] = {}
    if fp8.has_other_shared_experts(_hf_config(given.get("model_path"))):
        needed["disable_shared_experts_fusion"] = True
    if has_cuda:
        return {**DEFAULTS, **ON_CUDA, **given, **needed}
    return {**DEFAULTS, **WITHOUT_CUDA, **given, **ONLY_ON_CUDA, **needed}


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


def use_stand_ins(num_ranks: int = 1) -> None:
    """Make the CPU stand-ins importable here and in SGLang's processes.

    All ranks share all cores: SGLang rejects more ranks than NUMA nodes unless the cores of each
    rank are given.
    """
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join([cores] * num_ranks))
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{STAND_INS}:{inherited}" if inherited else str(STAND_INS)
    sys.path.insert(0, str(STAND_INS))
    # SGLang's debug dumper imports Megatron-core where it is installed; an engine does not need it.
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # compiling the MoE router costs more than it saves
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def keep_memory() -> None:
    """Make malloc reuse freed memory instead of returning it to the system.

    CUDA's allocator does so too. SGLang allocates memory for each bucket of weights; page faults on
    fresh memory would dominate the update.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def start_by_fork() -> None:
    """Fork SGLang's processes from this one, which has imported everything.

    Imports dominate their start. SGLang sets "spawn", because CUDA does not survive a fork.
    """
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_args, **_options: None


def use_threads(num_sharing: int | None) -> None:
    """Give the operators of each process this share of the cores, or one thread if it is None.

    ``num_sharing`` processes compute on this node at the same time.
    """
    import torch

    cpus = os.sched_getaffinity(0)
    cores = num_cores(cpus, read_siblings(cpus))
    threads = 1 if num_sharing is None else max(1, cores // num_sharing)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # Ray sets it to 1
    torch.set_num_threads(threads)  # torch read the variable at import


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

        has_cuda = torch.cuda.is_available()
        if not has_cuda:
            problem = hidden_gpu_problem(
                os.environ.get("CUDA_VISIBLE_DEVICES", ""),
                torch_version=torch.__version__,
                torch_cuda=torch.version.cuda,
            )
            if problem is not None:
                raise ConfigError(problem)
            use_stand_ins(int(arguments.get("tp_size", 1)))
            use_threads(gpus_per_node)
            keep_memory()
            start_by_fork()
        settings = typed_args(arguments)  # SGLang's names and types
        if has_cuda:
            graphs = graph_settings(settings, os.environ)
            os.environ.update(graphs.environment)  # SGLang's processes read it at graph capture
            settings |= graphs.server_args
            if settings.get("enable_memory_saver"):
                os.nice(PAUSED_NICENESS)
            capability = torch.cuda.get_device_capability()
            settings |= updatable_kernels(
                settings, _hf_config(settings.get("model_path")), capability
            )
        elif (folder := Path(str(settings["model_path"]))).is_dir():
            free = psutil.virtual_memory().available
            fraction = memory_fraction(folder, {**WITHOUT_CUDA, **settings}, free)
            settings = {"mem_fraction_static": fraction} | settings
        from sglang.srt.entrypoints.http_server import app, launch_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import ServerArgs
        from sglang.srt.utils import kill_process_tree

        load_plugins()  # as SGLang's command does, because plugins may change settings

    server_args = ServerArgs(**engine_arguments(settings, has_cuda=has_cuda))
    server_args.resolve_once()  # values that follow from others
    app.add_middleware(RequestSpans)
    app.add_middleware(EngineActivity)
    if server_args.api_key:
        own = host_port(server_args.host, server_args.port)
        app.add_middleware(ServerProof, key=server_args.api_key, address=own)
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
    from sglang.srt.managers.scheduler import run_scheduler_process

    from rlpost.engines.engine_processes import Guarded, prepare

    prepare(secret)
    return {
        "run_scheduler_process_func": Guarded(run_scheduler_process, secret),
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
