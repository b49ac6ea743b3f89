"""Settings that let an engine release the memory of its CUDA graphs (tag ``cuda_graph``). Pure.

Input: the settings of an engine and its environment variables. Output: additions to both, or
conflicts between them.

SGLang 0.5.21 to 0.5.23 capture graphs in memory that the tag releases only with the variable
``SGLANG_MEMORY_SAVER_CUDA_GRAPH`` (``FullCudaGraphBackend``), which is off by default. With it,
``BreakableCudaGraphBackend``, the default for prefill on CUDA, raises, so prefill runs without
graphs. A value set by the user takes precedence and determines the other one.

NCCL registers the buffers of a graph at capture (``NCCL_GRAPH_REGISTER``, by default on). After a
release the graph's addresses have other physical memory, and its replay hangs
(fzyzcjy/torch_memory_saver#88, sgl-project/sglang#40648). So engines that release graphs do not
register them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlpost.engines.server_args import sglang_flag

VARIABLE = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
REGISTER = "NCCL_GRAPH_REGISTER"
PREFILL = "cuda_graph_backend_prefill"
RELEASABLE = ("full", "disabled")
"""Backends whose graphs can be released, or that have none; others raise with the variable or
ignore it.
"""

_TRUE, _FALSE = ("1", "true"), ("0", "false")  # SGLang's get_bool_env_var


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """Additions to an engine's environment and to its ServerArgs."""

    environment: Mapping[str, str] = field(default_factory=dict)
    server_args: Mapping[str, object] = field(default_factory=dict)


def graph_settings(server_args: Mapping[str, object], environ: Mapping[str, str]) -> GraphSettings:
    """Return the settings that let the engine release its graphs; empty if it cannot.

    ``server_args``: the given fields of ServerArgs.
    """
    if not server_args.get("enable_memory_saver"):
        return GraphSettings()
    if (environ.get(VARIABLE) or "1").lower() not in _TRUE or _backends_against(server_args):
        return GraphSettings()
    is_given = "prefill" in _given_backends(server_args)
    return GraphSettings(
        {VARIABLE: environ.get(VARIABLE) or "1", REGISTER: environ.get(REGISTER) or "0"},
        {} if is_given else {PREFILL: "disabled"},
    )


def graph_problems(
    server_args: Mapping[str, object], environ: Mapping[str, str], *, offloads: bool
) -> list[str]:
    """Return conflicts between the user's settings, one line each.

    ``offloads``: engines release memory while the trainer runs.
    """
    value = environ.get(VARIABLE, "")
    if value and value.lower() not in (*_TRUE, *_FALSE):
        return [f"--environment {VARIABLE}={value}: SGLang takes it for 0; use 1 or 0"]
    if not offloads or not server_args.get("enable_memory_saver", True):
        return []
    if value.lower() not in _TRUE:
        releases = not value and not _backends_against(server_args)
        return _registration_problems(environ) if releases else []
    problems = [
        f"{flag} {backend}: SGLang cannot capture these graphs in memory that it gives up, which "
        f"{VARIABLE}={value} (--environment) asks for; use {' or '.join(RELEASABLE)}, or leave the variable "
        "out: then the graphs keep their memory while the trainer works"
        for flag, backend in _backends_against(server_args).items()
    ]
    return problems or _registration_problems(environ)


def _registration_problems(environ: Mapping[str, str]) -> list[str]:
    """Return the conflict of a given REGISTER with the release of graphs."""
    value = environ.get(REGISTER, "")
    if value in ("", "0"):
        return []
    return [
        f"--environment {REGISTER}={value}: engines release their CUDA graphs while the trainer "
        f"runs, and NCCL would replay them with freed buffers, which hangs; use {REGISTER}=0, or "
        f"keep the graphs on the GPU with --environment {VARIABLE}=0"
    ]


def _given_backends(server_args: Mapping[str, object]) -> dict[str, tuple[str, str]]:
    """Return by phase the flag that decides its backend, and the value.

    Precedence as in SGLang's ``parse_cuda_graph_config``: JSON, then setting, then disabling
    switch.
    """
    backends: dict[str, tuple[str, str]] = {}
    table = server_args.get("cuda_graph_config")
    for phase in ("decode", "prefill"):
        for switch in ("disable_cuda_graph", f"disable_{phase}_cuda_graph"):
            if server_args.get(switch):
                backends[phase] = (sglang_flag(switch), "disabled")
        setting = f"cuda_graph_backend_{phase}"
        if server_args.get(setting) is not None:
            backends[phase] = (sglang_flag(setting), str(server_args[setting]))
        chosen = table.get(phase) if isinstance(table, Mapping) else None
        if isinstance(chosen, Mapping) and "backend" in chosen:
            backends[phase] = (
                sglang_flag("cuda_graph_config") + f" {phase}.backend",
                str(chosen["backend"]),
            )
    return backends


def _backends_against(server_args: Mapping[str, object]) -> dict[str, str]:
    """Return the flags that select a backend whose graphs cannot be released, with its name."""
    given = _given_backends(server_args).values()
    against = {flag: backend for flag, backend in given if backend not in RELEASABLE}
    if server_args.get("debug_cuda_graph"):  # selects the breakable backend for decode
        against[sglang_flag("debug_cuda_graph")] = "true"
    return against
