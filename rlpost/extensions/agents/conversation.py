"""Conversations of one episode, kept as tokens. Pure except for the template's tokenizer.

Input: the messages of each request, and the sampled answers. Output: the input of each request to
an engine as a ``RequestPlan``, and at the end the trajectories.

Messages form a tree: the children of a message are those that followed it in some request. An
assistant message that was answered here remembers its tokens, as the end of a prefix of a ``Line``.
A request is the path of its messages. Its input is made in one of two ways:

    extension   the tokens of the last answered message on the path, then the text that the template
                writes after it, tokenised alone. Sampled tokens are never tokenised again.
    fresh       the whole text of the template, tokenised; no token of it is trained.

An extension is right only if the template keeps the text that it wrote before, as checked on the
text: with R the text of the whole request, P the text before the answer (the prompt that it
answered) and A the text of the sampled tokens, the rest of R after P + A follows the answer. If R
does not begin with P + A, the answer's spelling may have been lost in parsing; then the rest is
found by rendering a plain answer in its place, provided that R still contains all parts of the
answer. Otherwise the template rewrites history: Qwen3 and GLM-4.5 leave out the reasoning of turns
before the last user message. Engines must receive the same input as in production, so the request
is fresh or extends an earlier answer, and the answers before it are another trajectory.

A stop token that the template writes as well (``<|im_end|>``; in GLM-4.5 the mark of the next
message) is not repeated. A stop token that the template does not write stays in the context,
because it was sampled.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlpost.columns import FloatColumn, IntColumn, RunColumn, TokenSetColumn
from rlpost.engines.image_requests import ImageRequests
from rlpost.errors import DataError
from rlpost.extensions.agents.chat_messages import END_THINK, THINK, Message, Tool
from rlpost.extensions.agents.chat_template import ChatTemplate
from rlpost.extensions.agents.request_images import with_images
from rlpost.extensions.agents.trajectory import NO_VERSION, AnsweredTurn, Trajectory
from rlpost.types import ImageSpan, Sample

Tools = Sequence[Tool]
PROBE = "a-plain-answer"
FIRST = "first request"


class Line:
    """A token sequence with its turns. It grows at its end; earlier positions never change."""

    def __init__(
        self,
        sample: Sample,
        turns: list[AnsweredTurn],
        own_from: int,
        cause: str,
        *,
        has_tools: bool = False,
        has_answers: bool = False,
    ) -> None:
        """``own_from``: sampled tokens before this position are trained in another line.

        ``cause``: why the answer did not extend another line. ``has_tools``, ``has_answers``: of
        its first request, see ``Trajectory``.
        """
        self.sample, self.turns, self.own_from, self.cause = sample, turns, own_from, cause
        self.has_tools, self.has_answers = has_tools, has_answers

    def __len__(self) -> int:
        return len(self.sample.prompt_ids) + len(self.sample.response_ids)

    def beginning(self, length: int) -> Sample:
        """Return the first ``length`` tokens as a partial answer."""
        sample = self.sample
        if length == len(self):
            return sample
        count = length - len(sample.prompt_ids)
        spans = sample.versions[:count].runs
        return replace(
            sample,
            response_ids=sample.response_ids[:count],
            rollout_logprobs=sample.rollout_logprobs[:count],
            loss_mask=sample.mask[:count],
            version_spans=spans,
            policy_version=spans[-1][0],
            sampling_mask=None if sample.sampling_mask is None else sample.sampling_mask[:count],
            # As after a request that ended here: an engine never reads its last sampled token.
            routes=None if sample.routes is None else sample.routes[: length - 1],
            images=tuple(span for span in sample.images if span.end <= length),
        )

    def trajectory(self) -> Trajectory:
        """Return the line; see ``Trajectory``."""
        sample, prompt = self.sample, len(self.sample.prompt_ids)
        sampled = RunColumn([(0, prompt), *sample.mask.runs])
        owned = RunColumn([(0, self.own_from)]) + sampled[self.own_from :]
        all_versions = RunColumn([(NO_VERSION, prompt)]) + sample.versions
        # int64, because small versions are an int8 array, in which the difference may overflow.
        masked = (all_versions.array.astype("int64") - NO_VERSION) * sampled.array
        return Trajectory(
            token_ids=sample.prompt_ids + sample.response_ids,
            sampled=sampled,
            loss_mask=owned,
            logprobs=FloatColumn.zeros(prompt) + sample.rollout_logprobs,
            versions=RunColumn.of(masked + NO_VERSION),
            turns=tuple(
                replace(turn, is_trained=turn.start >= self.own_from) for turn in self.turns
            ),
            cause=self.cause,
            has_tools=self.has_tools,
            has_answers=self.has_answers,
            routes=sample.routes,
            sampling_mask=None
            if sample.sampling_mask is None
            else TokenSetColumn.joined([TokenSetColumn.whole(prompt), sample.sampling_mask]),
            images=sample.images,
        )


@dataclass(frozen=True, slots=True)
class Beginning:
    """The beginning of a text, as size and digest.

    Each turn has one, of the whole text before it: kept as texts, they would grow with the square
    of the number of turns.
    """

    size: int
    digest: bytes

    @classmethod
    def of(cls, text: str) -> Beginning:
        """Return a whole text as a beginning."""
        data = text.encode("utf-8", "surrogatepass")
        return cls(len(text), hashlib.blake2b(data, digest_size=16).digest())

    def is_in(self, text: str) -> bool:
        """Whether ``text`` begins with this text."""
        return len(text) >= self.size and Beginning.of(text[: self.size]) == self


@dataclass(slots=True)
class Answered:
    """The end of an answer: the first ``length`` tokens of a line.

    ``before`` is the length of the line without it, if the answer extended an existing line.
    """

    line: Line
    length: int
    before: int | None
    prompt: Beginning  # P
    answer_text: str  # A without stop token
    stop_text: str  # text of the stop token; empty if the answer was truncated


@dataclass(slots=True, eq=False, weakref_slot=True)
class MessageNode:
    """A message in the tree; the root has none.

    Parents hold their children, but not the reverse: a tree in cycles would be kept until the
    next full garbage collection, which runs between steps only.

    ``num_requests``: those in progress that end with it.
    """

    message: Message | None
    _parent: weakref.ref[MessageNode] | None = None
    answered: Answered | None = None
    children: dict[tuple[object, ...], list[MessageNode]] = field(default_factory=dict)
    num_requests: int = 0

    @property
    def parent(self) -> MessageNode | None:
        """The message before it; None for the root, and for a message out of the tree."""
        return None if self._parent is None else self._parent()

    def child(self, message: Message) -> MessageNode | None:
        """Return the child for a message of a request, or None.

        Several children may have the same key, such as two of the ``n`` answers to one request. Of
        these, the one with the same ids of calls is returned, or else the newest.
        """
        known = self.children.get(message.key, [])
        fitting = [node for node in known if node.message and node.message.may_be(message)]
        for node in reversed(fitting):
            assert node.message is not None
            if node.message.call_ids == message.call_ids:
                return node
        return fitting[-1] if fitting else None

    def added(self, message: Message, answered: Answered | None = None) -> MessageNode:
        """Add a child."""
        node = MessageNode(message, weakref.ref(self), answered)
        self.children.setdefault(message.key, []).append(node)
        return node

    def detach(self) -> MessageNode:
        """Remove the message, with those after it, from the tree; return its parent."""
        parent, self._parent = self.parent, None
        assert parent is not None and self.message is not None
        known = parent.children[self.message.key]
        known.remove(self)
        if not known:
            del parent.children[self.message.key]
        return parent

    def answers(self) -> list[MessageNode]:
        """Return the answers that were given here to the messages up to this one."""
        nodes = [node for known in self.children.values() for node in known]
        return [node for node in nodes if node.answered is not None]

    def path(self) -> list[MessageNode]:
        """Return the nodes from the first message to this one."""
        nodes: list[MessageNode] = []
        node: MessageNode = self
        while (parent := node.parent) is not None:
            nodes.append(node)
            node = parent
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """The input of one request.

    Attributes:
        prompt: the template's text of all messages.
        opens_thinking: that text ends inside a thought.
        base: the answer that is extended; None for a fresh input.
        added_ids: tokens after the base; all tokens of a fresh input.
        added_images: the images in them, with positions in the whole input.
        cause: why the answer begins another trajectory; empty if it extends one.
    """

    node: MessageNode
    prompt: Beginning
    opens_thinking: bool
    base: Answered | None
    added_ids: IntColumn
    cause: str
    has_tools: bool
    added_images: tuple[ImageSpan, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Length of the input."""
        return len(self.added_ids) + (0 if self.base is None else self.base.length)


def cause_of(
    nodes: Sequence[MessageNode], first_new: MessageNode | None, rewritten: int | None
) -> str:
    """Return why a request begins another trajectory.

    ``nodes`` are its messages, ``first_new`` is the first that no earlier request had, ``rewritten``
    the position of the last answer that the chat template does not keep.
    """
    if rewritten is not None:
        return f"the chat template rewrites the answer in message {rewritten}"
    if first_new is None:
        return "the same messages have another answer"
    place = nodes.index(first_new)
    parent, message = first_new.parent, first_new.message
    assert parent is not None and message is not None
    answers = parent.answers()
    if message.role == "assistant" and answers:
        answer = answers[-1].message
        assert answer is not None
        return (
            f"message {place} has other {_difference(answer, message)} than the answer given here"
        )
    if len(parent.children) > 1:
        return f"message {place} ({message.role}) differs from that of an earlier request"
    return f"message {place} ({message.role}) follows no answer given here"


def _difference(answer: Message, message: Message) -> str:
    """Return the first part in which a message differs from an answer."""
    if [call.key for call in answer.tool_calls] != [call.key for call in message.tool_calls]:
        return "tool calls"
    return "text" if answer.content.strip() != message.content.strip() else "reasoning"


class Conversation:
    """All messages and lines of an episode."""

    def __init__(
        self,
        template: ChatTemplate,
        *,
        longest: int | None = None,
        images: ImageRequests | None = None,
    ) -> None:
        """``longest``: tokens of the model's context. ``images``: None if it reads text alone."""
        self._template, self._longest, self._images = template, longest, images
        # By tools, which are at the beginning of the prompt.
        self._roots: dict[str, MessageNode] = {}
        self._lines: list[Line] = []
        self._released: list[MessageNode] = []  # ends of requests that may be forgotten

    def plan(self, messages: Sequence[Message], tools: Tools | None = None) -> RequestPlan:
        """Return the input for a request.

        Raises:
            DataError: the template rejects the messages.
            TooLong: their text is far beyond the context; it is not tokenised.
            UnreadableImages: engines would find other images in the text.
        """
        self._forget_unanswered()
        tools_key = json.dumps(tools) if tools else ""
        others = tools_key not in self._roots and bool(self._roots)
        node = self._roots.setdefault(tools_key, MessageNode(None))
        first_new: MessageNode | None = None
        for message in messages:
            child = node.child(message)
            if child is None:
                child = node.added(message)
                first_new = first_new or child
            node = child
        nodes = node.path()
        path = [each.message for each in nodes if each.message is not None]
        try:
            text = self._template.render(path, tools)
            self._template.check_length([text], self._longest)
        except DataError:  # refused: later requests must not be taken for a continuation
            if first_new is not None:
                first_new.detach()
            raise
        rewritten: int | None = None
        for place in range(len(nodes) - 1, -1, -1):
            base = nodes[place].answered
            if base is None:
                continue
            rest = None
            if base.prompt.is_in(text):
                rest = self._rest(base, path, place, text, tools)
            if rest is None:
                rewritten = place if rewritten is None else rewritten
                continue
            cause = "" if len(base.line) == base.length else cause_of(nodes, first_new, rewritten)
            return self._request_plan(node, text, base, rest, cause, tools)
        cause = cause_of(nodes, first_new, rewritten)
        if not self._lines:
            cause = FIRST
        elif others:
            cause = "its tools differ from those of earlier requests"
        return self._request_plan(node, text, None, text, cause, tools)

    def hold(self, plan: RequestPlan) -> None:
        """Keep the messages of a request until ``release``, also those without an answer."""
        plan.node.num_requests += 1

    def release(self, plan: RequestPlan) -> None:
        """Let the next plan forget the messages of a request if they have no answer.

        Requests that are refused or left would fill the memory otherwise.
        """
        plan.node.num_requests -= 1
        self._released.append(plan.node)

    def _forget_unanswered(self) -> None:
        while self._released:
            node = self._released.pop()
            while node.parent and not (node.children or node.num_requests or node.answered):
                node = node.detach()
        for key in [key for key, root in self._roots.items() if not root.children]:
            del self._roots[key]

    def add(
        self,
        plan: RequestPlan,
        message: Message,
        sample: Sample,
        turn: AnsweredTurn,
        *,
        answer_text: str,
        stop_text: str,
    ) -> MessageNode:
        """Record an answer, and return its node.

        ``sample`` holds the whole line with the answer at its end, as a response builder returns
        it; ``answer_text`` is the text of the answer's tokens without the stop token that ends it,
        ``stop_text`` the text of that token, or empty.
        """
        line, before = self._extended(plan, sample)
        line.turns.append(turn)
        answered = Answered(line, len(line), before, plan.prompt, answer_text, stop_text)
        return plan.node.added(message, answered)

    def remove(self, node: MessageNode) -> bool:
        """Forget an answer that reached no client; return whether it was forgotten.

        One that a request has continued stays: a client has read it.
        """
        answered = node.answered
        assert answered is not None
        line = answered.line
        if node.children or len(line) != answered.length:
            return False
        self._released.append(node.detach())
        if answered.before is None:
            self._lines.remove(line)
        else:
            line.sample = line.beginning(answered.before)
            line.turns.pop()
        return True

    def trajectories(self) -> tuple[Trajectory, ...]:
        """Return all lines, in the order in which their first own answers ended."""
        return tuple(line.trajectory() for line in self._lines)

    def _extended(self, plan: RequestPlan, sample: Sample) -> tuple[Line, int | None]:
        """Return the line of an answer, and its length before if it existed.

        It is the base's, unless another answer has extended it.
        """
        base = plan.base
        if base is not None and len(base.line) == base.length:
            base.line.sample = sample
            return base.line, base.length
        cause = plan.cause
        if not cause or any(each.answered for each in plan.node.answers()):
            cause = "the same messages have another answer"
        own_from, turns = len(sample.prompt_ids), []
        if base is not None:
            own_from = base.length
            turns = [turn for turn in base.line.turns if turn.end <= base.length]
        messages = [each.message for each in plan.node.path()]
        line = Line(
            sample,
            turns,
            own_from,
            cause,
            has_tools=plan.has_tools,
            has_answers=any(each is not None and each.role == "assistant" for each in messages),
        )
        self._lines.append(line)
        return line, None

    def _rest(
        self, base: Answered, path: list[Message], place: int, text: str, tools: Tools | None
    ) -> str | None:
        """Return the part of ``text`` after an answer and its stop token.

        ``text`` begins with the answer's prompt. None if the template rewrites the answer.
        """
        start, answer = base.prompt.size, base.answer_text + base.stop_text
        if text.startswith(answer, start):
            return text[start + len(answer) :]
        message, probe = path[place], PROBE
        while probe in text:
            probe += PROBE[:1]
        plain = [*path[:place], Message("assistant", probe), *path[place + 1 :]]
        try:
            plain_text = self._template.render(plain, tools)
        except DataError:  # templates may require a call before each output of a tool
            return None
        probe_start = plain_text.find(probe)
        if probe_start < start or not base.prompt.is_in(plain_text):
            return None
        rest = plain_text[probe_start + len(probe) :]
        if not text.endswith(rest):
            return None
        written = text[start : len(text) - len(rest)]
        parts = [message.reasoning, message.content, *(call.name for call in message.tool_calls)]
        if not all(part.strip() in written for part in parts):
            return None
        if END_THINK in base.answer_text and END_THINK not in written:  # an empty thought
            return None
        return rest.removeprefix(base.stop_text)

    def _request_plan(
        self,
        node: MessageNode,
        text: str,
        base: Answered | None,
        rest: str,
        cause: str,
        tools: Tools | None,
    ) -> RequestPlan:
        """Return the input of a request with ``text``, of which ``rest`` follows the base."""
        self._released.append(node)  # unless ``hold`` keeps it
        added_ids = self._template.encode(rest) if rest else IntColumn()
        images: tuple[ImageSpan, ...] = ()
        if self._images is not None:
            messages = [each.message for each in node.path() if each.message is not None]
            before = None if base is None else base.line.beginning(base.length)
            added_ids, images = with_images(self._images, before, added_ids, messages)
        is_open = text.rstrip().endswith(THINK)
        return RequestPlan(
            node, Beginning.of(text), is_open, base, added_ids, cause, bool(tools), images
        )
