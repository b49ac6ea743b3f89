"""Routes: which experts an engine chose for each token that it read, collected over the requests of an answer.

Input: what engines of a mixture of experts return beside their tokens. Output: the ``RouteColumn`` of an
answer, with the routes under which its log-probs were computed.

An engine returns the routes of its whole input and output each time, as it computed them last. After new
weights these are no longer the routes of the tokens that the old weights generated. So the routes of a token
are taken from the first request that read it, and are never replaced:

    request 1, version 4    prompt a b c      aborted for new weights: routes of prompt, a, b
    request 2, version 5    prompt a b c d e  routes of c, d from here; those of prompt, a, b are left out

The log-prob of a token follows from the tokens before it. That of d belongs to version 5, whose engine has
read prompt, a and b again with routes of its own; the trainer, which reads a sequence once, uses those of
version 4 for them. A token at position p of ``Sample.routes`` is therefore routed by the version of the
response token p + 1 in ``Sample.version_spans`` (the prompt by the first version).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlpost.columns import RouteColumn
from rlpost.errors import RolloutError

ROUTES_FROM = "rlpost_routes_from"
"""Label of a request that asks for routes: the position of the first token whose routes are wanted.

The router (sglang-router 0.3.2) knows the fields of a request and drops ``return_routed_experts``. It passes
labels on, and ``route_requests`` in the engine's process translates this one."""


@dataclass(frozen=True, slots=True)
class RouteFormat:
    """The routes of one model.

    ``layers`` are the MoE layers among all ``num_layers``; each sends a token to ``topk`` of ``num_experts``.
    """

    layers: tuple[int, ...]
    num_layers: int
    num_experts: int
    topk: int

    @property
    def bytes_per_token(self) -> int:
        """Size of the routes of one token in memory."""
        return len(self.layers) * self.topk * RouteColumn.dtype(self.num_experts).itemsize

    def unknown(self, tokens: int) -> RouteColumn:
        """Routes of ``tokens`` tokens that the trainer routes itself."""
        dtype = RouteColumn.dtype(self.num_experts)
        return RouteColumn(np.full((tokens, len(self.layers), self.topk), np.iinfo(dtype).max, dtype))

    def decode(self, text: str) -> RouteColumn:
        """Decode ``meta_info.routed_experts``: base64 of int32 [tokens, all layers, topk].

        Raises:
            RolloutError: it has another shape, numbers of experts that do not exist, or one expert twice for a token.
        """
        numbers = np.frombuffer(base64.b64decode(text), dtype="<i4")
        if numbers.size % (self.num_layers * self.topk):
            raise RolloutError(
                f"an engine returned {numbers.size} experts, which are not {self.num_layers} layers of {self.topk} for "
                "each token; does it serve the model of --hf-checkpoint?"
            )
        every_layer = numbers.reshape(-1, self.num_layers, self.topk)
        first, last = self.layers[0], self.layers[-1]
        is_range = last - first + 1 == len(self.layers)  # then a view suffices, else a copy four times as large
        routes = every_layer[:, first : last + 1] if is_range else every_layer[:, list(self.layers)]
        if routes.size and (routes.min() < 0 or routes.max() >= self.num_experts):
            raise RolloutError(
                f"an engine returned expert {routes.max()} (smallest {routes.min()}) of {self.num_experts}; does it "
                "serve the model of --hf-checkpoint?"
            )
        if routes.size and (np.diff(np.sort(routes[-1], axis=-1), axis=-1) == 0).any():
            raise RolloutError(
                "an engine returned one expert twice for a token: its MoE kernel chooses experts without recording "
                "them; set --sglang-moe-runner-backend triton, or use --use-rollout-routing-replay false"
            )
        return RouteColumn(routes.astype(RouteColumn.dtype(self.num_experts)))

    def encode(self, routes: RouteColumn) -> str:
        """The inverse of ``decode``; layers without experts have expert 0, unknown routes -1."""
        every_layer = np.zeros((len(routes), self.num_layers, self.topk), dtype="<i4")
        every_layer[:, list(self.layers)] = routes.array
        every_layer[~routes.known] = -1
        return base64.b64encode(every_layer.tobytes()).decode()


class AnswerRoutes:
    """The routes of an answer in progress, from its first token on. See the module for whose they are."""

    def __init__(self, form: RouteFormat, so_far: RouteColumn | None = None, *, num_read: int = 0) -> None:
        """``so_far`` are the routes of a partial answer, of which engines have read ``num_read`` tokens."""
        self.format = form
        self._column = form.unknown(0) if so_far is None else so_far
        self._inserted: list[range] = []  # positions of tokens that no model generated
        self._append(form.unknown(max(0, num_read - len(self._column))))

    def labels(self) -> dict[str, str]:
        """What a request has to say to be answered with the routes that are missing."""
        return {ROUTES_FROM: str(len(self._column))}

    def inserted(self, positions: range) -> None:
        """Leave the routes of these tokens to the trainer; they have not been read yet."""
        self._inserted.append(positions)

    def add(self, meta: Mapping[str, Any], *, num_read: int, recomputed: int = 0) -> None:
        """Add the routes of a response.

        Args:
            meta: the field ``meta_info`` of the response.
            num_read: tokens that the engine had read at its end: all of prompt and answer except the last.
            recomputed: the first so many of these were generated by older weights and read once more by new ones,
                so their own routes are lost.

        Raises:
            RolloutError: there are no routes, or those of another number of tokens.
        """
        start = len(self._column)
        if num_read <= start:
            return
        text = meta.get("routed_experts")
        if text is None:
            if meta["finish_reason"]["type"] != "abort":
                raise RolloutError(
                    "an engine returned no routes of experts, which --use-rollout-routing-replay needs; was it started "
                    "with --enable-return-routed-experts?"
                )
            # It was aborted while it waited for memory, where SGLang has dropped them.
            self._append(self.format.unknown(num_read - start))
            return
        routes = self.format.decode(text)
        if len(routes) == num_read:
            routes = routes[start:]
        elif len(routes) != num_read - start:
            raise RolloutError(
                f"an engine returned the routes of {len(routes)} tokens instead of {num_read - start}, from token "
                f"{start} to {num_read}"
            )
        unknown = [range(start, recomputed), *self._inserted]
        self._append(_without(routes, [range(each.start - start, each.stop - start) for each in unknown]))
        self._inserted = [range(num_read, each.stop) for each in self._inserted if each.stop > num_read]

    def truncate(self, num_tokens: int) -> None:
        """Remove the routes of all tokens after the first ``num_tokens`` of prompt and answer."""
        self._column = self._column[:num_tokens]

    def column(self) -> RouteColumn:
        """The routes of the first tokens, up to the last one that an engine has read."""
        return self._column

    def _append(self, routes: RouteColumn) -> None:
        if len(routes):
            self._column = RouteColumn.joined([self._column, routes])


def _without(routes: RouteColumn, unknown: list[range]) -> RouteColumn:
    """Mark the routes of some tokens as unknown."""
    array = routes.array
    for each in unknown:
        first, end = max(0, each.start), max(0, each.stop)
        if first < min(end, len(array)):
            array = array if array.flags.writeable else array.copy()
            array[first:end] = np.iinfo(array.dtype).max
    return RouteColumn(array)
