"""Serves the newest line of ``metrics.jsonl`` to Prometheus; requires the attempt's token.

Input: an address, the token, then one mapping per step.
Output: ``GET /metrics`` in Prometheus's text format, written by the official client library: one
gauge ``rlpost_AREA_NAME`` per metric, labelled with the run and, for an evaluation, with its set.
Nothing else is served.
"""

from __future__ import annotations

import hmac
import logging
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlpost.errors import ConfigError
from rlpost.metrics.names import declared

logger = logging.getLogger(__name__)

REQUEST_S = 10.0  # socket timeout of a client


class PrometheusServer:
    """Serves requests in a separate thread. Raises ConfigError when it cannot start."""

    def __init__(self, host: str, port: int, *, token: str, run: str) -> None:
        try:
            from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"observe.use_prometheus = true (--use-prometheus): {error}; pip install prometheus-client on the "
                "nodes, or leave it out"
            ) from None
        self._newest = Newest(run)
        registry = CollectorRegistry()
        registry.register(self._newest)

        class Handler(_Handler):
            """The handler with this server's token and registry."""

            wanted = f"Bearer {token}".encode()
            content_type = CONTENT_TYPE_LATEST

            def page(self) -> bytes:
                return generate_latest(registry)

        class Server(ThreadingHTTPServer):
            """Listens on an IPv4 or IPv6 address."""

            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"observe.prometheus_host, prometheus_port: cannot serve at {host} port {port}: {error}; choose "
                "another with --prometheus-port"
            ) from error
        self.port: int = self._server.server_address[1]
        shown = f"[{host}]" if ":" in host else host
        logger.info("prometheus: http://%s:%d/metrics, with the attempt's token", shown, self.port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="prometheus", daemon=True
        )
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Replace the served line by the metrics of ``step``."""
        self._newest.line = {"step": step, **metrics}

    def close(self) -> None:
        """Stop serving and wait for the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    wanted: bytes
    content_type: str
    timeout = REQUEST_S

    def page(self) -> bytes:
        raise NotImplementedError

    def do_GET(self) -> None:
        """Serve ``/metrics`` to a client with the token."""
        shown = (self.headers.get("Authorization") or "").encode()
        if not hmac.compare_digest(shown, self.wanted):
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

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: one line per scrape would fill the log."""


class Newest:
    """A Prometheus collector that exposes the newest line as gauges."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.line: Mapping[str, float] = {}

    def collect(self) -> Iterator[Any]:
        """Yield one metric family per gauge name."""
        from prometheus_client.core import GaugeMetricFamily

        families: dict[str, Any] = {}
        for name, value in self.line.items():
            gauge, labels = gauge_name(name)
            labels = {"run": self.run, **labels}
            if gauge not in families:
                known = declared(name)
                families[gauge] = GaugeMetricFamily(
                    gauge, known.meaning if known else name, labels=list(labels)
                )
            families[gauge].add_metric(list(labels.values()), float(value))
        yield from families.values()


def gauge_name(name: str) -> tuple[str, dict[str, str]]:
    """Return the Prometheus name and the labels of a metric.

    >>> gauge_name("eval/aime-24/pass@8")
    ('rlpost_eval_pass_at_8', {'set': 'aime-24'})
    """
    area, *rest = name.split("/")
    labels = {"set": rest.pop(0)} if area == "eval" and len(rest) > 1 else {}
    plain = "_".join([area, *rest]).replace("@", "_at_")
    return "rlpost_" + re.sub(r"[^a-zA-Z0-9_]", "_", plain), labels
