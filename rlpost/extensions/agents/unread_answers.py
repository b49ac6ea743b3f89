"""Answers that no request has continued: a client that did not receive one asks again. Pure."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlpost.extensions.agents.chat_messages import BadRequest
from rlpost.extensions.agents.conversation import MessageNode
from rlpost.extensions.agents.requests import ChatRequest, Completion
from rlpost.extensions.agents.written_answer import WrittenAnswer

Nodes = Mapping[MessageNode, WrittenAnswer]
MAX_FAILED = 256
"""Failed requests with the same messages that are remembered."""


@dataclass(frozen=True, slots=True)
class _Unread:
    """A recorded completion, with the nodes of its answers; ``after``: the end of its request."""

    request: ChatRequest
    after: MessageNode
    completion: Completion
    nodes: Nodes


class UnreadAnswers:
    """Recorded completions of an episode that no request has continued."""

    def __init__(self) -> None:
        self._unread: dict[int, _Unread] = {}  # by number of the request
        # Requests that ended without an answer, without messages, by the last of these. Their
        # clients ask again for an answer of their own.
        self._failed: weakref.WeakKeyDictionary[MessageNode, list[ChatRequest]] = (
            weakref.WeakKeyDictionary()
        )

    def add(
        self, completion: Completion, request: ChatRequest, after: MessageNode, nodes: Nodes
    ) -> None:
        """Remember a completion; ``after`` is the last message of its request."""
        self._unread[completion.number] = _Unread(request, after, completion, nodes)

    def add_failed(
        self, node: MessageNode, request: ChatRequest, error: BaseException | None = None
    ) -> None:
        """Remember that a request got no answer; ``node`` is its last message.

        ``error``: of the request; clients repeat none that is refused with 400.
        """
        if isinstance(error, BadRequest) and error.status == 400:
            return
        failed = self._failed.setdefault(node, [])
        if len(failed) < MAX_FAILED:
            failed.append(replace(request, messages=()))

    def pop(self, completion: Completion) -> Nodes | None:
        """Forget a completion that did not arrive, and return the nodes of its answers.

        None if it was continued.
        """
        unread = self._unread.pop(completion.number, None)
        if unread is None:
            return None
        self.add_failed(unread.after, unread.request)
        return unread.nodes

    def forget_continued(self, node: MessageNode) -> None:
        """Forget the completions that a request continues; ``node`` is its last message."""
        path = set(node.path())
        read = [number for number, each in self._unread.items() if path.intersection(each.nodes)]
        for number in read:
            del self._unread[number]

    def lost(self, node: MessageNode, request: ChatRequest) -> Completion | None:
        """Return the newest completion of the same request, for a client that repeats it.

        None if a request like it has failed: the completions are those of others, as of a harness
        that samples several answers to the same messages.
        """
        failed, options = self._failed.get(node, []), replace(request, messages=())
        if options in failed:
            failed.remove(options)
            return None
        for unread in reversed(self._unread.values()):
            same_options = replace(unread.request, messages=request.messages) == request
            if unread.after is node and same_options:
                return unread.completion
        return None
