"""Convert prompts with a response in the data to samples, as if engines had generated them.

Input: a line with a prompt and its response (--label-key), or with a conversation whose assistant
messages are trained (--apply-chat-template). Output: token ids, and a loss mask over the tokens
after the first prompt.

Invariant: exactly the tokens of assistant messages are trained, up to and including the token that
ends the turn. Their text is that of the row, once, with one such token; a row of which this cannot
be is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from rlpost.columns import FloatColumn, IntColumn, RunColumn
from rlpost.errors import DataError
from rlpost.tasks.answer_text import BEGIN_OF_THOUGHT, END_OF_THOUGHT, Channels
from rlpost.tasks.examples import ExampleTokenizer
from rlpost.tasks.messages import Content
from rlpost.tasks.prompts import NO_RESPONSE, is_conversation
from rlpost.tasks.tokenizer import (
    END_TOKEN_FILES,
    Tools,
    check_all_rendered,
)
from rlpost.types import Prompt, Sample, SampleGroup, ScoredSample, refuse_images

_NEXT = {"role": "user", "content": "?"}
_OPEN_THOUGHT = re.compile(rf"{BEGIN_OF_THOUGHT}(\s*)$")
_CLOSED_THOUGHT = re.compile(rf"{END_OF_THOUGHT}\s*$")
_THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message beside ``content`` whose text is a thought."""

Messages = Sequence[Mapping[str, object]]


class SupervisedTokenizer(ExampleTokenizer):
    """Like ``PromptTokenizer``, but keeps a conversation for ``group``, as JSON."""

    def __call__(self, content: Content, tools: Tools | None = None) -> tuple[str, tuple[int, ...]]:
        """Return text and ids of a prompt, or of a whole conversation.

        Raises DataError like ``PromptTokenizer``.
        """
        if not is_conversation(content):
            return super().__call__(content, tools)
        if tools:
            raise DataError(
                "a conversation for supervised training has tools, which is not supported; omit --tool-key"
            )
        ids, _ = self._conversation(content)
        return json.dumps(content), ids

    def whole(self, prompt: Prompt) -> Sequence[int]:
        """See ``ExampleTokenizer``."""
        if prompt.label is not None:
            return [*prompt.token_ids, *self._response(prompt)]
        _messages(prompt)
        return prompt.token_ids  # of the whole conversation

    def group(self, prompt: Prompt) -> SampleGroup:
        """See ``ExampleTokenizer``.

        The engine's log-probs are zeros, because there are none; the supervised loss does not read
        them.
        """
        refuse_images(prompt.images, "supervised training")
        if prompt.label is not None:
            prompt_ids = prompt.token_ids
            response_ids = IntColumn(self.whole(prompt)[len(prompt_ids) :])
            mask = RunColumn([(1, len(response_ids))])
        else:
            ids, whole_mask = self._conversation(_messages(prompt))
            first = whole_mask.index(1)
            prompt_ids, response_ids = IntColumn(ids[:first]), IntColumn(ids[first:])
            mask = RunColumn.of(whole_mask[first:])
        sample = Sample(
            prompt_id=prompt.prompt_id,
            index=0,
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            rollout_logprobs=FloatColumn.zeros(len(response_ids)),
            text=self.decode(response_ids),
            finish_reason="stop",
            policy_version=0,
            label=prompt.label,
            loss_mask=mask,
        )
        return SampleGroup(prompt.prompt_id, (ScoredSample(sample, 0.0),))

    def marked(self, prompt: Prompt, *, most: int) -> str:
        """See ``ExampleTokenizer``."""
        (scored,) = self.group(prompt).samples
        text, at = _shortened(self._written(scored.sample.prompt_ids), most), 0
        for value, count in scored.sample.mask.runs:
            part = self._written(scored.sample.response_ids[at : at + count])
            part, at = _shortened(part, most), at + count
            text += f"\u27e6{part}\u27e7" if value else part
        return text

    def _written(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _response(self, prompt: Prompt) -> list[int]:
        """Return the ids of a label, with the token that ends it. Raises DataError."""
        assert prompt.label is not None
        label, end = self._split_end(prompt.label)
        has_channels = isinstance(self._thought_form, Channels)
        if has_channels and not label.startswith("<|channel|>"):
            raise DataError(
                "the model writes its answers in channels, and the label has none; give the row as messages that end "
                "with the assistant's, without --label-key"
            )
        begins_thought = label.lstrip().startswith(BEGIN_OF_THOUGHT)
        if begins_thought and (opened := _OPEN_THOUGHT.search(prompt.text)):
            # the prompt has the tag already
            label = label.lstrip().removeprefix(BEGIN_OF_THOUGHT).removeprefix(opened[1])
        elif begins_thought and _CLOSED_THOUGHT.search(prompt.text):
            raise DataError(
                f"the label begins with {BEGIN_OF_THOUGHT}, and the prompt already has a thought that is "
                f"closed: {prompt.text[-40:]!r}; let the chat template think (--apply-chat-template-kwargs)"
            )
        if not has_channels:  # those of the channels are special
            self._check_special(label, "the label")
        if not any(_parts({"content": label})):
            raise DataError("the label has no text to train on; give it, or remove the row")
        return [*self.encode(label), self._end() if end is None else end]

    def _split_end(self, text: str) -> tuple[str, int | None]:
        """Return a response without the end tokens that it ends with, and the id of the first."""
        tokens = {self._tokenizer.convert_ids_to_tokens(one): one for one in self._end_ids}
        # a config may name ids beyond the vocabulary
        end_tokens, end = {token: one for token, one in tokens.items() if token}, None
        while token := next(filter(text.rstrip().endswith, end_tokens), None):
            text, end = text.rstrip().removesuffix(token), end_tokens[token]
        return text, end

    def _check_special(self, text: str, what: str) -> None:
        """Raise DataError for a special token in a text that is trained."""
        present = [token for token in self.special_tokens if token in text]
        if present:
            raise DataError(
                f"{what} has {present[0]!r}, which the tokenizer encodes as a special token, so the model would "
                "learn to write it there; remove it"
            )

    def _end(self) -> int:
        end = self._tokenizer.eos_token_id
        if end is None:
            raise DataError(
                "the tokenizer has no eos_token to end responses with; set one in tokenizer_config.json"
            )
        return end

    def _conversation(self, messages: Messages) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids of a conversation, and for each 1 in an assistant message, else 0."""
        if not self._apply_chat_template:
            raise DataError(
                "a prompt is a list of messages; add --apply-chat-template to convert it to text"
            )
        messages = [self._without_end(message) for message in messages]
        text = self._render(messages, generation_prompt=False)
        spans = self._assistant_spans(messages, text)
        check_all_rendered(messages, text)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
        mask = [0] * len(ids)
        end_ids = self._end_ids
        for start, stop in spans:
            # also a token that begins before the message and holds its first characters
            in_span = [
                index
                for index, (begin, end) in enumerate(offsets)
                if start <= begin < stop or begin < start < end
            ]
            ends = [index for index in in_span if ids[index] in end_ids]
            # Phi-3: an end token after that of the turn
            while len(ends) > 1 and not self._written(ids[ends[-2] + 1 : ends[-1]]).strip():
                ends.pop()
            for index in in_span:
                mask[index] = int(not ends or index <= ends[-1])
            if ends:
                continue
            # GLM-4.5: the token of the next role ends an answer, and nothing follows the last one
            following = in_span[-1] + 1
            if following == len(mask):
                ids.append(self._end_after(messages[-1], end_ids))
                mask.append(1)
            elif ids[following] in end_ids:
                mask[following] = 1
        if 1 not in mask[1:] or mask[0]:
            raise DataError("a conversation needs a message before the first assistant message")
        return tuple(ids), tuple(mask)

    def _without_end(self, message: Mapping[str, object]) -> Mapping[str, object]:
        """Return an assistant message without an end token, which the template writes."""
        if message["role"] != "assistant":
            return message
        content, _ = self._split_end(str(message["content"]))
        return {**message, "content": content}

    @cached_property
    def _end_ids(self) -> set[int]:
        """The ids that end an answer: the tokenizer's and those of the model's configs."""
        has_configs = any((self._folder / name).is_file() for name in END_TOKEN_FILES)
        if has_configs:
            return self.end_ids
        eos = self._tokenizer.eos_token_id
        return set() if eos is None else {eos}

    def _end_after(self, answer: Mapping[str, object], end_ids: set[int]) -> int:
        """Return the token that ends an answer, where the template writes it before the next message.

        A short conversation shows it, because templates may rewrite this one when others follow.
        """
        shown: Messages = [_NEXT, {"role": "assistant", "content": "?"}]
        following = _NEXT
        if calls := answer.get("tool_calls"):
            shown = [_NEXT, {"role": "assistant", "content": "", "tool_calls": calls}]
            following = {"role": "tool", "content": "?"}
        try:
            text = self._render(shown, generation_prompt=False)
            longer = self._render([*shown, following], generation_prompt=False)
        except DataError:  # a template without tools, or one that needs ids of calls
            return self._end()
        ids = self.encode(longer[len(text) :]) if longer.startswith(text) else ()
        return ids[0] if ids and ids[0] in end_ids else self._end()

    def _assistant_spans(self, messages: Messages, text: str) -> list[tuple[int, int]]:
        """Return start and end of each assistant message in ``text``, the rendered conversation.

        Raises DataError if one is not rendered as it is.
        """
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], generation_prompt=True)
            after = self._render(messages[: number + 1], generation_prompt=False)
            if not after.startswith(before):
                same = next(
                    at for at in range(len(before), -1, -1) if after.startswith(before[:at])
                )
                raise DataError(
                    f"message {number + 1} (role 'assistant'): the chat template begins a new answer with "
                    f"{before[same:]!r:.80}, and writes this one without it; give the prompt and the response as text "
                    "(--label-key), or other arguments (--apply-chat-template-kwargs)"
                )
            if not text.startswith(after):
                raise DataError(
                    f"message {number + 1} of a conversation is rendered differently when others follow: the chat "
                    "template rewrites earlier turns; give each turn as a separate line of the data"
                )
            what = f"message {number + 1} (role 'assistant')"
            self._check_special(_text_of(message), what)
            opened = _OPEN_THOUGHT.search(before)
            _check_trained(message, (opened[0] if opened else "") + after[len(before) :], what)
            spans.append((len(before), len(after)))
        return spans

    def _render(self, messages: Messages, *, generation_prompt: bool) -> str:
        if not messages:
            return ""
        return self._templated(list(messages), add_generation_prompt=generation_prompt)


def _check_trained(message: Mapping[str, object], rendered: str, what: str) -> None:
    """Check that a rendered assistant message has the whole text of the message, once.

    Templates silently leave out thoughts or tool calls, or repeat a tag that the prompt has.

    Raises:
        DataError: there is no text, a part is missing, or a thought begins twice.
    """
    parts, calls = list(_parts(message)), list(_calls(message))
    if not parts and not calls:
        raise DataError(f"{what} has no text to train on; give its text, or remove the message")
    plain, at = " ".join(rendered.split()), 0
    for part in parts:
        position = plain.find(part, at)
        if position < 0:
            raise DataError(
                f"the chat template leaves a part of {what} out of what is trained: {part!r:.80}; use a template that "
                "writes it, or give the prompt and the response as text (--label-key)"
            )
        at = position + len(part)
    for call in calls:
        if call not in rendered:
            raise DataError(
                f"the chat template does not write the tool call {call!r:.80} of {what}; use a template that "
                "supports tools"
            )
    for tag in (BEGIN_OF_THOUGHT, END_OF_THOUGHT):
        row_count, count = _text_of(message).count(tag), rendered.count(tag)
        if not row_count <= count <= max(1, row_count):  # a template may add the tags of a thought
            raise DataError(
                f"{what} has {tag} {row_count} times, and as the chat template writes it {count} times; leave out of "
                "the message what the template writes"
            )


def _parts(message: Mapping[str, object]) -> Iterator[str]:
    """Yield the texts of a message in order, without tags of thoughts and repeated white space."""
    thoughts = [message[key] for key in _THOUGHT_KEYS if isinstance(message.get(key), str)]
    for text in (*thoughts[:1], message.get("content") or ""):
        for part in re.split(f"{BEGIN_OF_THOUGHT}|{END_OF_THOUGHT}", str(text)):
            if plain := " ".join(part.split()):
                yield plain


def _calls(message: Mapping[str, object]) -> Iterator[str]:
    """Yield the name of each function that a message calls."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            yield function["name"]


def _text_of(message: Mapping[str, object]) -> str:
    return "\n".join(str(message.get(key) or "") for key in (*_THOUGHT_KEYS, "content"))


def _shortened(text: str, most: int) -> str:
    """Return a text without its middle if it is longer than ``most`` characters."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def _messages(prompt: Prompt) -> Messages:
    """Return the conversation that ``SupervisedTokenizer`` kept in a prompt."""
    try:
        messages = json.loads(prompt.text)
    except ValueError:
        messages = None
    if not is_conversation(messages):
        raise DataError(f"prompt {prompt.prompt_id} {NO_RESPONSE}")
    return messages
