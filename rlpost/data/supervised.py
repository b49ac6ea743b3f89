"""Supervised examples: prompts whose response is in the data, made into samples as if an engine had written them.

Input: a line with a prompt and its response (--label-key), or with a conversation whose assistant messages are to be
learned (--apply-chat-template). Output: token ids and a loss mask over what follows the first prompt. Invariant: a
token is trained when it stands in what an assistant wrote, up to the token that ends the turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from rlpost.columns import FloatColumn, IntColumn, RunColumn
from rlpost.data.tokenizer import Content, PromptTokenizer, Tools
from rlpost.errors import DataError
from rlpost.types import Prompt, Sample, SampleGroup, ScoredSample

Messages = Sequence[Mapping[str, Any]]


class SupervisedTokenizer(PromptTokenizer):
    """As ``PromptTokenizer``; a conversation that an assistant ends is kept whole, as JSON, for ``group``."""

    def __call__(self, content: Content, tools: Tools | None = None) -> tuple[str, tuple[int, ...]]:
        """Text and ids of a prompt, or of a whole conversation. Raises DataError as ``PromptTokenizer`` does."""
        if not _is_conversation(content):
            return super().__call__(content, tools)
        if tools:
            raise DataError("a conversation to learn from has tools: leave --tool-key out")
        ids, _ = self._conversation(content)
        return json.dumps(content), ids

    def group(self, prompt: Prompt) -> SampleGroup:
        """A group of one sample: the response of the data. Log-probs of an engine are none: zeros, which no loss here
        reads. Raises DataError for a prompt with neither a label nor a message of an assistant."""
        if prompt.label is not None:
            prompt_ids = prompt.token_ids
            response_ids = IntColumn([*self.encode(prompt.label), self._end()])
            mask = RunColumn([(1, len(response_ids))])
        else:
            ids, whole = self._conversation(_messages(prompt))
            first = whole.index(1)
            prompt_ids, response_ids = IntColumn(ids[:first]), IntColumn(ids[first:])
            mask = RunColumn.of(whole[first:])
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

    def _end(self) -> int:
        end = self._tokenizer.eos_token_id
        if end is None:
            raise DataError("the tokenizer has no eos_token, so no response would end; name one in its config")
        return end

    def _conversation(self, messages: Messages) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids of a whole conversation, and 1 for each that an assistant wrote."""
        if not self._apply_chat_template:
            raise DataError("a prompt is a list of messages; --apply-chat-template turns it into text")
        text = self._render(messages, asks=False)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(messages[:number], asks=True)
                after = self._render(messages[: number + 1], asks=False)
                if not (text.startswith(after) and after.startswith(before)):
                    raise DataError(
                        f"message {number} of a conversation is written otherwise once others follow: the chat "
                        "template rewrites earlier turns. Give each turn a line of its own"
                    )
                spans.append((len(before), len(after)))
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = tuple(encoded["input_ids"]), encoded["offset_mapping"]
        mask = [0] * len(ids)
        for start, stop in spans:
            own = [i for i, (begin, _) in enumerate(offsets) if start <= begin < stop]
            ends = [i for i in own if ids[i] == self._tokenizer.eos_token_id]
            for i in own:
                mask[i] = int(not ends or i <= ends[-1])
        if 1 not in mask[1:] or mask[0]:
            raise DataError("a conversation needs a message before the first one of an assistant, and words in it")
        return ids, tuple(mask)

    def _render(self, messages: Messages, *, asks: bool) -> str:
        if not messages:
            return ""
        return self._templated(list(messages), add_generation_prompt=asks)


def _is_conversation(content: Any) -> TypeGuard[Messages]:
    return isinstance(content, list) and bool(content) and content[-1].get("role") == "assistant"


def _messages(prompt: Prompt) -> Messages:
    try:
        messages = json.loads(prompt.text)
    except ValueError:
        messages = None
    if not _is_conversation(messages):
        raise DataError(
            f"prompt {prompt.prompt_id} has no response to learn: set --label-key, or end its messages with one of an "
            "assistant"
        )
    return messages
