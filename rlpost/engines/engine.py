"""Starts and stops one SGLang engine.

Input: model, address, key, settings. Output: an address that answers, or an error with the end of
the log. A plain class with one process; ``rlpost.driver`` places it on a node.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from common.addresses import http_url
from rlpost.engines.process import ServerProcess
from rlpost.errors import RolloutError
from rlpost.observe.memory import machine, process_gb
from rlpost.types import EngineAddress

logger = logging.getLogger(__name__)

CALL_S = 10.0  # timeout of one request to the server
LONGEST_GENERATION_S = 24 * 3600
"""Timeout of one request. An engine that hangs is found by its health; answers of 128k tokens on
few GPUs take hours, because SGLang retracts and queues some of them.
"""
INITIAL_VERSION = "0"  # an engine's version of the weights of its model folder


class Engine:
    """One SGLang server, or its part on one of several nodes."""

    def __init__(
        self,
        *,
        model_path: str,
        api_key: str,
        server_args: Mapping[str, object],
        log_path: str | Path,
        num_gpus: int = 1,
        node_rank: int = 0,
        ignores_term: bool = False,
    ) -> None:
        """
        Args:
            ignores_term: TERM, which may reach every process of a Slurm step, does not end the
                server: the caller ends it once its requests are aborted.
            num_gpus: GPUs of the whole engine.
            node_rank: rank of this part; only part 0 answers requests.
        """
        self.url = ""
        self._server: ServerProcess | None = None
        self._given = {
            "model_path": model_path,
            "server_args": dict(server_args),
            "num_gpus": num_gpus,
            "node_rank": node_rank,
        }
        self._model_path = model_path
        self._api_key = api_key
        self._server_args = dict(server_args)
        self._log_path = log_path
        self._num_gpus = num_gpus
        self._node_rank = node_rank
        self._ignores_term = ignores_term

    def start(
        self, host: str, port: int, *, deadline_s: float, gpus_per_node: int | None = None
    ) -> EngineAddress:
        """Start the server on ``host:port`` and wait until it accepts requests.

        Parts other than the first accept none and return immediately.

        Args:
            gpus_per_node: number of GPUs that share the CPUs of this node. The server is bound to
                the CPUs next to its GPUs; None leaves it unbound.

        Raises:
            EngineDied: the process ended; with the end of its log.
            RolloutError: it was not ready within ``deadline_s`` seconds; it is stopped.
        """
        started = time.monotonic()
        self.stop()  # from a start that was cancelled
        self.url = http_url(host, port)
        self._server = ServerProcess(f"engine {self.url}", self._log_path)
        self._server.spawn(
            {
                "host": host,
                "port": port,
                "model_path": self._model_path,
                "api_key": self._api_key,
                "tp_size": self._num_gpus,
                "node_rank": self._node_rank,
                "weight_version": INITIAL_VERSION,
                **self._server_args,
            },
            gpus_per_node=gpus_per_node,
            ignores_term=self._ignores_term,
        )
        if self._node_rank:
            return EngineAddress(url=self.url, num_gpus=self._num_gpus)
        import_module("rlpost.engines.engine_client")  # 0.1 s, spent while the server starts
        try:
            self._server.wait_ready(deadline_s)
        except RolloutError:
            self.stop()
            raise
        self._freeze_garbage_collector()
        logger.info("engine %s ready after %.1f s", self.url, time.monotonic() - started)
        return EngineAddress(url=self.url, num_gpus=self._num_gpus)

    def _freeze_garbage_collector(self) -> None:
        """Freeze existing objects in the server's garbage collector.

        SGLang does so after its warm-up. Without CUDA the warm-up is skipped, and each cache flush
        would run a full collection (0.4 s).
        """
        from rlpost.engines.engine_client import EngineClient

        client = EngineClient(self.url, self._api_key, timeout_s=CALL_S)
        try:
            asyncio.run(client.request("POST", "/freeze_gc", None))
        except RolloutError as error:
            logger.warning("%s", error)

    def alive(self) -> bool:
        """Whether its process runs."""
        return self._server is not None and self._server.alive()

    def check_alive(self) -> None:
        """Raise EngineDied, with the end of the log, unless its process runs."""
        if self._server is not None and not self._server.alive():
            raise self._server.died()

    @property
    def pid(self) -> int | None:
        return self._server.pid if self._server else None

    def stop(self) -> None:
        """End the server and everything it started."""
        if self._server is not None:
            self._server.stop()

    def running(self) -> tuple[str, dict[str, object]] | None:
        """URL and settings of the server, without the key; None unless its process runs."""
        return (self.url, self._given) if self.alive() else None

    def memory_use(self) -> dict[str, float]:
        """Return its current memory use, by metric name."""
        return {"memory/engine_gb": process_gb(), **machine()}
