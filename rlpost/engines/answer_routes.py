"""The routes of one answer, collected over its requests.

Input: the routes in each response of an engine (``rollout.routes``). Output: those under which the
log-probs of the answer were computed.

An engine returns the routes of its whole input and output each time, as computed last. After a
weight update, these are no longer the routes under which the old weights generated tokens. So the
routes of a token are taken from the first request that read it, and are never replaced:

    request 1, version 4    prompt a b c      aborted for new weights: routes of prompt, a, b
    request 2, version 5    prompt a b c d e  routes of c, d from here; those of prompt, a, b are left out

The log-prob of a token depends on the tokens before it. That of d belongs to version 5, whose
engine has read prompt, a and b again with different routes. The trainer reads a sequence once, with
the routes of version 4 for these tokens. A token at position p of ``Sample.routes`` is therefore
routed by the version of the response token p + 1 in ``Sample.version_spans`` (the prompt by the
first version).
"""

from __future__ import annotations

import numpy as np

from rlpost.columns import RouteColumn
from rlpost.engines.answer import Answer
from rlpost.engines.routes import RouteFormat
from rlpost.errors import RolloutError


class AnswerRoutes:
    """The routes of an answer in progress, from its first token on; see the module."""

    def __init__(
        self, form: RouteFormat, so_far: RouteColumn | None = None, *, num_read: int = 0
    ) -> None:
        """``so_far``: routes of a partial answer; engines have read ``num_read`` of its tokens."""
        self.format = form
        self._column = form.unknown(0) if so_far is None else so_far
        self._inserted: list[range] = []  # positions of tokens that no model generated
        self._append(form.unknown(max(0, num_read - len(self._column))))

    def fields(self) -> dict[str, object]:
        """Return the fields of a request for the missing routes."""
        return {"return_routed_experts": True, "routed_experts_start_len": len(self._column)}

    def inserted(self, positions: range) -> None:
        """Let the trainer route these tokens, which no engine has read yet."""
        self._inserted.append(positions)

    def add(self, answer: Answer, *, num_read: int) -> None:
        """Add the routes of a response.

        ``num_read`` is the number of tokens that the engine had read at its end: all of prompt and
        answer so far except the last. In a response with tokens of two versions, the engine has
        read the first tokens again with the second weights. Their original routes are lost, and the
        trainer routes them.

        Raises:
            RolloutError: there are no routes, or those of another number of tokens.
        """
        # Positions count from the first token of the prompt; those in ``routes`` from ``start``.
        start = len(self._column)
        if num_read <= start:
            return
        routes = answer.routes
        if routes is None:
            if answer.finish_reason["type"] != "abort":
                raise RolloutError(
                    "an engine returned no routes of experts, which --use-rollout-routing-replay needs; was it started "
                    "with --enable-return-routed-experts?"
                )
            # The request was aborted while it waited for memory: SGLang has dropped its routes.
            self._append(self.format.unknown(num_read - start))
            return
        if len(routes) == num_read:
            routes = routes[start:]
        elif len(routes) != num_read - start:
            raise RolloutError(
                f"an engine returned the routes of {len(routes)} tokens instead of {num_read - start}, from token "
                f"{start} to {num_read}"
            )
        spans = answer.version_spans
        # With several versions, the last one has read all tokens before its own once more.
        recomputed_end = num_read - spans[-1][1] if len(spans) > 1 else 0
        unknown = [range(start, recomputed_end), *self._inserted]
        in_routes = [range(each.start - start, each.stop - start) for each in unknown]
        self._append(_with_unknown(routes, in_routes))
        self._inserted = [
            range(num_read, each.stop) for each in self._inserted if each.stop > num_read
        ]

    def truncate(self, num_tokens: int) -> None:
        """Remove the routes of all tokens after the first ``num_tokens`` of prompt and answer."""
        self._column = self._column[:num_tokens]

    def column(self) -> RouteColumn:
        """Return the routes of all tokens up to the last one that an engine has read."""
        return self._column

    def _append(self, routes: RouteColumn) -> None:
        if len(routes):
            self._column = RouteColumn.joined([self._column, routes])


def _with_unknown(routes: RouteColumn, unknown: list[range]) -> RouteColumn:
    """Return the column with the routes of these positions marked as unknown."""
    array = routes.array
    for each in unknown:
        first, end = max(0, each.start), max(0, each.stop)
        if first < min(end, len(array)):
            array = array if array.flags.writeable else array.copy()
            array[first:end] = np.iinfo(array.dtype).max
    return RouteColumn(array)
