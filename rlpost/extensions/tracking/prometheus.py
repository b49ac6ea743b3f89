"""Serve the newest line of ``metrics.jsonl`` to Prometheus; requires the attempt's token.

Input: an address, the token, then one mapping per step.
Output: ``GET /metrics`` in Prometheus's text format, written by the official client library: the
metrics by their names in ``prometheus_name``, labelled with the run and, for an evaluation, with its set;
``rlpost_run_info`` with what identifies the run, and the time of the last step. Nothing else is
served. A file of targets (``file_sd``) in the run folder follows the head across attempts.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler
from typing import TYPE_CHECKING, Any

from common.addresses import host_port, http_url
from common.cluster import Cluster
from common.files import write_atomic
from common.scrape_targets import DRIVER_TARGETS, NONE, targets_text
from rlpost import __version__
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.observe.metric_names import METRICS, declared
from rlpost.observe.mirrors import Write

if TYPE_CHECKING:
    from prometheus_client import Metric

logger = logging.getLogger(__name__)

REQUEST_S = 5.0  # socket timeout of a client
MAX_CLIENTS = 32
"""Connections at a time. One more ends the oldest: without a token, connections are free to all."""
LAST_STEP = "rlpost_last_step_timestamp_seconds"
OWN_NAMES = (LAST_STEP, "rlpost_run", "rlpost_run_info")
COUNTERS = frozenset({"run/num_attempts", "run/num_preemptions", "run/num_engine_restarts"})
"""Metrics that only grow over a run; all others are gauges."""
_ENDINGS = {
    ("tokens/s", "tokens_per_s"): ("tokens_per_second", 1.0),
    ("tokens/s", "tokens_per_s_per_gpu"): ("tokens_per_second_per_gpu", 1.0),
    ("TFLOP/s", "tflops_per_gpu"): ("flops_per_second_per_gpu", 1e12),
    ("s", "_s"): ("_seconds", 1.0),
    ("share", "_frac"): ("_ratio", 1.0),
    ("GB", "_gb"): ("_bytes", 1e9),
}
"""Unit and ending of a declared name: its ending in Prometheus, and the factor of the value."""


@contextmanager
def open_mirror(config: Config, run_folder: Path, cluster: Cluster) -> Iterator[Write | None]:
    """Yield a function that replaces the served line; None without --use-prometheus.

    Without --prometheus-port it is the last port of the job's block. A scrape must present the
    attempt's secret. Raises ConfigError.
    """
    settings = config.observe
    if not settings.use_prometheus:
        yield None
        return
    server = PrometheusServer(
        settings.prometheus_host,
        settings.prometheus_port or cluster.port_base + cluster.port_count - 1,
        token=cluster.secret,
        run=run_folder.name,
        about=about(config, cluster, os.environ),
        targets=run_folder / DRIVER_TARGETS,
    )
    try:
        yield server.write
    finally:
        server.close()


def about(config: Config, cluster: Cluster, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that identify an attempt: attempt, job, model and version."""
    return {
        "attempt": Path(cluster.attempt_dir).name,
        "job": environ.get("SLURM_JOB_ID", ""),
        "model": Path(config.checkpoint.hf_checkpoint).name,
        "version": __version__,
    }


class PrometheusServer:
    """Serves requests in a separate thread. Raises ConfigError when it cannot start."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str,
        run: str,
        about: Mapping[str, str] | None = None,
        targets: Path | None = None,
    ) -> None:
        """Start to serve.

        Args:
            host: the address to bind.
            port: 0 lets the kernel choose one; ``port`` has it.
            run: label of every metric.
            about: further labels of ``rlpost_run_info``.
            targets: file to write for Prometheus's ``file_sd_configs``; emptied by ``close``.
        """
        try:
            from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"observe.use_prometheus = true (--use-prometheus): {error}; pip install prometheus-client on the "
                "nodes, or leave it out"
            ) from None
        self._newest = Newest(run, about or {})
        registry = CollectorRegistry()
        registry.register(self._newest)

        class Handler(_Handler):
            """The handler with this server's token and registry."""

            authorization = f"Bearer {token}".encode()
            content_type = CONTENT_TYPE_LATEST

            def page(self) -> bytes:
                return generate_latest(registry)

        class Server(_Server):
            """Listens on an IPv4 or IPv6 address."""

            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"observe.prometheus_host, prometheus_port: cannot serve at {host} port {port}: {error}; choose "
                "another with --prometheus-port"
            ) from error
        self.port: int = self._server.server_address[1]
        url = http_url(host, self.port)
        logger.info("prometheus: %s/metrics, with the attempt's token", url)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="prometheus", daemon=True
        )
        self._thread.start()
        self._targets = targets
        self._written = targets_text([(_target(host, self.port), {"run": run})])
        self._write_targets(self._written)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Replace the served line by the metrics of ``step``; those of an earlier step are added."""
        self._newest.update({"step": step, **metrics})

    def _write_targets(self, text: str) -> None:
        if self._targets is None:
            return
        try:
            write_atomic(self._targets, text)
        except OSError as error:
            logger.warning("%s: %s; Prometheus does not find this attempt", self._targets, error)

    def close(self) -> None:
        """Stop serving and wait for the thread.

        The file of targets becomes an empty list, unless another attempt has written it since: a
        run that has ended is not down.
        """
        with suppress(OSError):
            if self._targets is not None and self._targets.read_text() == self._written:
                self._write_targets(NONE)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], handler: Callable[..., BaseRequestHandler]
    ) -> None:
        self._clients: dict[socket.socket, None] = {}  # oldest first
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: object) -> None:
        """Handle a request in a thread; end the oldest if there are too many."""
        with self._lock:
            self._clients[request] = None
            num_excess = max(0, len(self._clients) - MAX_CLIENTS)
            excess = list(self._clients)[:num_excess]
        for oldest in excess:
            with suppress(OSError):  # the client has just closed it
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: object) -> None:
        """Log only failures of the handler: any user can break connections."""
        if not isinstance(sys.exception(), OSError):
            logger.warning("prometheus: a request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    authorization: bytes
    content_type: str
    timeout = REQUEST_S

    def page(self) -> bytes:
        raise NotImplementedError

    def do_GET(self) -> None:
        """Serve ``/metrics`` to a client with the token."""
        shown = (self.headers.get("Authorization") or "").encode()
        if not hmac.compare_digest(shown, self.authorization):
            message = b"the attempt's token is required: Authorization: Bearer TOKEN\n"
            self._answer(401, message, "text/plain")
        elif self.path.split("?")[0] != "/metrics":
            self._answer(404, b"not found; use /metrics\n", "text/plain")
        else:
            self._answer(200, self.page(), self.content_type)

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: one line per scrape would fill the log."""


class Newest:
    """A Prometheus collector that exposes the newest line."""

    def __init__(self, run: str, about: Mapping[str, str]) -> None:
        self._run, self._about = run, dict(about)
        self._line: Mapping[str, float] = {}
        self._at = 0.0

    def update(self, line: Mapping[str, float]) -> None:
        """Replace the line, or add to it the values of a line of an earlier step."""
        newest = self._line.get("step", line["step"])
        if line["step"] < newest:
            self._line = {**self._line, **line, "step": newest}
            return
        self._line, self._at = line, time.time()

    def collect(self) -> Iterator[Metric]:
        """Yield one metric family per name."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            InfoMetricFamily,
        )

        labels = {"run": self._run, **self._about}
        yield InfoMetricFamily("rlpost_run", "what identifies the run", value=labels)
        if not self._line:
            return
        stamp = GaugeMetricFamily(LAST_STEP, "when the newest line was written", labels=["run"])
        stamp.add_metric([self._run], self._at)
        yield stamp
        families: dict[str, Any] = {}
        for name, (shown, factor, entry) in unique_names(self._line).items():
            value = self._line[name]
            labels = {"run": self._run, **entry}
            if shown not in families:
                known = declared(name)
                kind = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
                families[shown] = kind(shown, known.meaning if known else name, labels=list(labels))
            families[shown].add_metric(list(labels.values()), float(value) * factor)
        yield from families.values()


def _target(host: str, port: int) -> str:
    """Return the address to scrape; this host's name where the server listens on all addresses."""
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return host_port(host, port)


def prometheus_name(name: str) -> tuple[str, float, dict[str, str]]:
    """Return the name, the factor of the value, and the labels of a metric. Pure.

    The name is ``rlpost_AREA_NAME`` in base units with the unit as a suffix: ``_seconds``,
    ``_bytes``, ``_ratio``; ``_total`` for what only grows
    (https://prometheus.io/docs/practices/naming/). Only declared metrics have a unit; the name of a
    custom one is kept, as far as Prometheus's characters allow.

    >>> prometheus_name("memory/actor_gpu_peak_gb")
    ('rlpost_memory_actor_gpu_peak_bytes', 1000000000.0, {})
    >>> prometheus_name("eval/aime-24/pass@8")
    ('rlpost_eval_pass_at_8', 1.0, {'set': 'aime-24'})
    """
    area, *rest = name.split("/")
    labels = {"set": rest.pop(0)} if area == "eval" and len(rest) > 1 else {}
    known = declared(name)
    plain, factor = "_".join([area, *rest]), 1.0
    for (unit, ending), (shown, size) in _ENDINGS.items():
        if known is not None and known.unit == unit and plain.endswith(ending):
            plain, factor = plain.removesuffix(ending) + shown, size
            break
    if name in COUNTERS:
        plain = plain.replace("_num_", "_") + "_total"
    plain = plain.replace("@", "_at_")
    return "rlpost_" + re.sub(r"[^a-zA-Z0-9_]", "_", plain), factor, labels


def unique_names(names: Iterable[str]) -> dict[str, tuple[str, float, dict[str, str]]]:
    """Return ``prometheus_name`` of each name, no two equal: Prometheus drops equal samples.

    A name that another one has, or the server itself, ends with a digest of the metric's name; the
    declared metric keeps its own, else the first in order of the alphabet. Pure.

    >>> [of_name[0] for of_name in unique_names(["my.metric", "my_metric"]).values()]
    ['rlpost_my_metric', 'rlpost_my_metric_a4a26d']
    """
    taken: set[tuple[str, tuple[tuple[str, str], ...]]] = {(name, ()) for name in OWN_NAMES}
    unique = {}
    for name in sorted(names, key=lambda name: (declared(name) is None, name)):
        shown, factor, labels = prometheus_name(name)
        if (shown, tuple(labels.items())) in taken:
            shown = f"{shown}_{hashlib.sha256(name.encode()).hexdigest()[:6]}"
        taken.add((shown, tuple(labels.items())))
        unique[name] = shown, factor, labels
    return unique


def all_names() -> dict[str, str]:
    """Return the Prometheus names of all declared metrics without a variable part, by metric."""
    fixed = [metric.name for metric in METRICS if not re.search(r"LABEL|@K", metric.name)]
    return {name: prometheus_name(name)[0] for name in fixed}
