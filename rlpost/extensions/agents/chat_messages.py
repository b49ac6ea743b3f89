"""Messages in one form, whatever the format of the request. Pure.

Input: messages of OpenAI's chat completions (``anthropic_format`` converts the others). Output:
``Message``s; their keys, by which a conversation is recognised; their form for the chat template.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from rlpost.extensions.agents.json_values import canonical, loads_strict
from rlpost.extensions.agents.message_images import (
    MessageImage,
    SentImage,
    TextAndImages,
    base64_of,
    parts_of,
)

ROLES = ("system", "user", "assistant", "tool")
WITH_IMAGES = ("user", "tool")
"""Roles whose messages may have images; chat templates write none for the others."""
THINK, END_THINK = "<think>", "</think>"


class BadRequest(Exception):
    """A request that is refused.

    ``status`` is the HTTP status, ``code`` a word for programs, ``param`` the wrong field.
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def constrains_sampling(what: str, param: str, *, remedy: str) -> BadRequest:
    """Return the refusal of a field that would change the distribution of the answer."""
    return BadRequest(
        f"{what} would constrain sampling, so the log-probs would not be the policy's; {remedy}",
        param=param,
    )


def over() -> BadRequest:
    """Return the refusal of a request to an episode that is closed."""
    return BadRequest("the episode is over", status=401, code="invalid_api_key")


def halted() -> BadRequest:
    """Return the refusal of a request while generation is halted."""
    return BadRequest("generation is halted", status=503, code="rollout_halted")


class ToolFunction(TypedDict, total=False):
    """A function that the model may call; ``parameters`` is a JSON schema of an object."""

    name: str
    description: str
    parameters: dict[str, Any]


class Tool(TypedDict, total=False):
    """A tool in OpenAI's format."""

    type: str
    function: ToolFunction


def function_tool(given: Mapping[str, Any], parameters: object) -> Tool:
    """Convert a tool of another API to OpenAI's format, which chat templates expect.

    ``parameters``: the JSON schema of the tool's input; a tool without one takes no arguments.
    """
    schema: Any = parameters or {"type": "object", "properties": {}}
    description = given.get("description") or ""
    function: ToolFunction = {
        "name": given["name"],
        "description": description,
        "parameters": schema,
    }
    check_function(function, str(given["name"]))
    return {"type": "function", "function": function}


def name_of(tool: Tool) -> str:
    """Return the name of a function."""
    return str(tool["function"]["name"])


def check_function(function: Mapping[str, Any], where: str) -> None:
    """Raise BadRequest unless a tool's description is text, its parameters the schema of an object."""
    if not isinstance(function.get("description") or "", str):
        raise BadRequest(f"the description of tool {where} must be a text", param="tools")
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    is_schema = parameters is None or isinstance(parameters, Mapping)
    if not is_schema or not (properties is None or isinstance(properties, Mapping)):
        raise BadRequest(
            f"the parameters of tool {where} must be a JSON schema of an object", param="tools"
        )


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. ``arguments`` is JSON text of an object."""

    id: str
    name: str
    arguments: str

    @property
    def key(self) -> tuple[str, str]:
        """Name and arguments in one canonical spelling: a harness may reformat the JSON."""
        return self.name, canonical(json.loads(self.arguments))


@dataclass(frozen=True, slots=True)
class Message:
    """One message. ``reasoning`` is the text between the model's thinking marks.

    ``images``: of a message of the user or a tool, with their places in ``content``.
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    images: tuple[SentImage | MessageImage, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for all forms in which a harness may send the same message again.

        A harness may drop white space around the text of an assistant, its reasoning, the ids of
        its calls, and the text beside them.
        """
        if self.role == "assistant" and self.tool_calls:
            return (self.role, *(call.key for call in self.tool_calls))
        if self.role == "assistant":
            return (self.role, self.content.strip())
        return (self.role, self.content, self.tool_call_id, self.name, self.images)

    @property
    def call_ids(self) -> list[str]:
        """The ids of its calls."""
        return [call.id for call in self.tool_calls]

    def may_be(self, other: Message) -> bool:
        """Whether ``other``, which has the same key, may be this message.

        It may if it has no reasoning or the same, and the same text; with the ids of its calls, the
        text may be missing.
        """
        if other.reasoning and other.reasoning.strip() != self.reasoning.strip():
            return False
        if other.content.strip() == self.content.strip():
            return True
        return not other.content.strip() and other.call_ids == self.call_ids

    def for_template(self) -> dict[str, object]:
        """Return the message as chat templates expect it, with parsed arguments of calls."""
        return self._fields(json.loads)

    def for_openai(self) -> dict[str, object]:
        """Return the message as OpenAI's chat completions have it."""
        found = self._fields(str)
        if self.tool_calls:
            found["content"] = self.content or None
        return found

    def _fields(self, convert_arguments: Callable[[str], object]) -> dict[str, object]:
        content = parts_of(self.content, self.images) if self.images else self.content
        fields: dict[str, object] = {"role": self.role, "content": content}
        if self.reasoning:
            fields["reasoning_content"] = self.reasoning
        if self.tool_calls:
            fields["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": convert_arguments(call.arguments),
                    },
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id:
            fields["tool_call_id"] = self.tool_call_id
        if self.name:
            fields["name"] = self.name
        return fields


def messages_from_openai(given: object) -> tuple[Message, ...]:
    """Convert the field ``messages``. Raises BadRequest."""
    if not isinstance(given, list) or not given:
        raise BadRequest("messages must be a list with at least one message", param="messages")
    return checked(_message(raw, f"messages[{place}]") for place, raw in enumerate(given))


def checked(messages: Iterable[Message], *, needs_answer: bool = True) -> tuple[Message, ...]:
    """Return the messages of a request with outputs of tools in the order of their calls.

    Chat templates write outputs without ids, so only their order says which call they answer.
    Messages that are parts of one answer are joined.

    Raises:
        BadRequest: an output belongs to no call before it, or a call has two; or the last message
            is an answer although the request ``needs_answer``: engines would not continue it, but
            write another one.
    """
    ordered: list[Message] = []
    in_order = _outputs_after_calls(messages)
    for role, group in itertools.groupby(in_order, key=lambda message: message.role):
        neighbours = list(group)
        if role == "tool":
            call_ids = ordered[-1].call_ids if ordered else []
            neighbours = _in_order_of_calls(neighbours, call_ids)
        elif role == "assistant":
            neighbours = _joined_parts(neighbours)
        ordered += neighbours
    if needs_answer and ordered[-1].role == "assistant":
        raise BadRequest(
            "the last message is the assistant's; continuing an answer is not supported: end with a "
            "message of the user or the output of a tool",
            param="messages",
        )
    return tuple(ordered)


def _outputs_after_calls(messages: Iterable[Message]) -> list[Message]:
    """Return messages with the outputs of tools directly after the calls that they answer.

    Programs write notes of the user or the system between both; templates expect none there. An output
    after a later answer stays, for that answer was given without it.
    """
    ordered: list[Message] = []
    notes: list[Message] = []  # behind the last answer and its outputs
    call_ids: set[str] = set()  # of that answer
    for message in messages:
        if message.role == "tool" and (not notes or message.tool_call_id in call_ids):
            ordered.append(message)
        elif message.role == "assistant":
            if notes or (ordered and ordered[-1].role == "tool"):
                call_ids = set()
            call_ids.update(filter(None, message.call_ids))
            ordered += [*notes, message]
            notes = []
        else:
            notes.append(message)
    return ordered + notes


def _joined_parts(answers: list[Message]) -> list[Message]:
    """Join neighbouring messages of the assistant that are parts of one answer.

    LiteLLM sends a message for each call, the agents SDK of OpenAI for JavaScript one for the
    reasoning, one for the text and one for the calls (itemsToMessages).
    """
    groups: list[list[Message]] = []
    is_thought = False  # the last group is reasoning alone
    for answer in answers:
        is_rest = bool(groups) and _is_rest(answer, groups[-1][0], is_thought=is_thought)
        if is_rest:
            groups[-1].append(answer)
        else:
            groups.append([answer])
        begins = is_thought if is_rest else bool(answer.reasoning)
        is_thought = begins and not answer.content and not answer.tool_calls
    return [
        replace(
            first,
            content="".join([part.content for part in (first, *rest)]),
            tool_calls=tuple(call for part in (first, *rest) for call in part.tool_calls),
        )
        for first, *rest in groups
    ]


def _is_rest(answer: Message, first: Message, *, is_thought: bool) -> bool:
    """Whether a message without reasoning has only calls, or follows one with reasoning alone.

    ``first``: of the messages before it that are one answer; ``is_thought``: they are reasoning alone.
    """
    if answer.reasoning or answer.name != first.name:
        return False
    return is_thought or (bool(answer.tool_calls) and not answer.content)


def _in_order_of_calls(outputs: list[Message], call_ids: list[str]) -> list[Message]:
    """Sort outputs of tools by the ids of their calls; without ids they keep their order."""
    ids = [output.tool_call_id for output in outputs]
    places = {call_id: place for place, call_id in enumerate(call_ids)}
    if not all(ids) or not all(call_ids) or len(places) < len(call_ids):
        return outputs
    answered = set[str]()
    for call_id in ids:
        if call_id not in places:
            raise BadRequest(
                f"the output of call {call_id!r} follows no message with this call; its calls are "
                f"{', '.join(call_ids) or 'none'}",
                param="messages",
            )
        if call_id in answered:
            raise BadRequest(f"call {call_id!r} has two outputs; send one", param="messages")
        answered.add(call_id)
    return sorted(outputs, key=lambda output: places[output.tool_call_id])


def _message(raw: object, where: str) -> Message:
    if not isinstance(raw, Mapping):
        raise BadRequest(f"{where} must be an object", param=where)
    role = "system" if raw.get("role") == "developer" else raw.get("role")
    if role not in ROLES:
        raise BadRequest(f"{where}.role {role!r} must be one of {', '.join(ROLES)}", param=where)
    if role in WITH_IMAGES:
        both = content_of(raw.get("content"), where, image_kind="image_url")
        return Message(
            role,
            both.text,
            tool_call_id=_text(raw, "tool_call_id", where),
            name=_text(raw, "name", where),
            images=both.images,
        )
    _check_fields(raw, where)
    content = text_of(raw.get("content"), where) or _text(raw, "refusal", where)
    if role != "assistant":
        return Message(role, content, name=_text(raw, "name", where))
    reasoning = _text(raw, "reasoning_content", where) or _text(raw, "reasoning", where)
    if not reasoning and END_THINK in content:  # a harness that keeps the answer as one text
        before, _, after = content.partition(END_THINK)
        thought = before.partition(THINK)[2] if THINK in before else before
        reasoning, content = thought.strip("\n"), after.lstrip("\n")
    calls = raw.get("tool_calls") or []
    if not isinstance(calls, list):
        raise BadRequest(f"{where}.tool_calls must be a list", param=where)
    return Message(
        role,
        content,
        reasoning,
        tuple(_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)),
        name=_text(raw, "name", where),
    )


def _check_fields(raw: Mapping[str, object], where: str) -> None:
    """Raise BadRequest for parts of an answer that no template writes: they would be lost."""
    for field, remedy in (("function_call", "send tool_calls"), ("audio", "send its text")):
        if raw.get(field):
            raise BadRequest(f"{where}.{field} is not supported; {remedy}", param=where)


def text_of(content: object, where: str, kinds: Collection[str] = ("text",)) -> str:
    """Return the text of a content: a string, None, or parts of the types ``kinds``.

    Raises BadRequest.
    """
    return content_of(content, where, kinds).text


def content_of(
    content: object,
    where: str,
    kinds: Collection[str] = ("text",),
    *,
    image_kind: str | None = None,
) -> TextAndImages:
    """Return the text of a content and the images in it, which are parts of type ``image_kind``.

    Nothing of an image is decoded. Raises BadRequest.
    """
    if content is None:
        return TextAndImages("")
    if isinstance(content, str):
        return TextAndImages(content)
    if not isinstance(content, Sequence):
        raise BadRequest(f"{where}.content must be a string or a list of parts", param=where)
    text, images = "", list[SentImage]()
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(part, Mapping) or kind not in (*kinds, image_kind):
            one_of = "text" if image_kind is None else f"text and {image_kind}"
            raise BadRequest(
                f"{where}.content has a part of type {kind!r}; only {one_of} is read here",
                param=where,
            )
        if kind != image_kind:
            text += _text(part, "text", where)
            continue
        try:
            images.append(SentImage(len(text), base64_of(part), where))
        except ValueError as error:
            raise BadRequest(f"{where}: {error}", param=where) from error
    return TextAndImages(text, tuple(images))


def _text(raw: Mapping[str, object], field: str, where: str) -> str:
    value = raw.get(field)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRequest(f"{where}.{field} must be a string", param=where)
    return value


def _call(given: object, where: str) -> ToolCall:
    raw = given if isinstance(given, Mapping) else {}
    function = raw.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where} must have a function with a name", param=where)
    arguments = checked_arguments(function.get("arguments"), where)
    return ToolCall(str(raw.get("id") or ""), function["name"], arguments)


def checked_arguments(given: object, where: str) -> str:
    """Return the arguments of a call as JSON, which some programs send as an object.

    "{}" for an empty text. Raises BadRequest.
    """
    text = given if isinstance(given, str) else json.dumps(given or {})
    try:
        parsed = loads_strict(text or "{}")
    except ValueError as error:
        raise BadRequest(f"{where}: its arguments are not JSON: {error}", param=where) from error
    if not isinstance(parsed, dict):
        raise BadRequest(f"{where}: its arguments must be a JSON object", param=where)
    return json.dumps(parsed, ensure_ascii=False)
