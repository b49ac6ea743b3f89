"""A random agent harness: turns, tool calls, edits, branches and parallel requests."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from rlpost.extensions.agents.chat_messages import BadRequest
from rlpost.extensions.agents.episode import OpenEpisode
from rlpost.extensions.agents.openai_format import chat_request

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
WORDS = ["fine", "Paris", " the", "\n", "répondre", "42", " 天", "try", "{", '"', " it again."]
Body = dict[str, Any]


class Writer:
    """Generates answers of a policy in the format of ``kind``, some of them untidy."""

    def __init__(
        self, kind: str, draw: random.Random, *, untidy: float = 0.3, opens_thinking: bool = False
    ) -> None:
        self.kind, self.draw, self.untidy = kind, draw, untidy
        self.opens_thinking = opens_thinking

    def words(self, most: int = 8) -> str:
        """Return up to ``most`` random words."""
        return "".join(self.draw.choices(WORDS, k=self.draw.randint(1, most)))

    def __call__(self) -> str:
        """Return one answer without its end-of-turn token."""
        draw = self.draw
        tidy = draw.random() >= self.untidy
        content = self.words().strip() if tidy else self.words() + draw.choice(["", " ", "\n\n"])
        thought = self.words().strip() if draw.random() < 0.5 else ""
        calls = [self._call(tidy) for _ in range(draw.choice([0, 0, 1, 1, 2]))]
        if self.kind == "xml":  # the prompt ends with <think>, or with an empty thought
            head = f"{thought}\n</think>\n\n" if self.opens_thinking else ""
            return head + content + ("\n\n" + "\n".join(calls) if calls else "")
        if self.kind == "qwen":
            head = f"<think>\n{thought}\n</think>\n\n" if thought else ""
            if calls and tidy and draw.random() < 0.5:
                content = ""
            between = "\n" if content else ""
            return head + content + (between + "\n".join(calls) if calls else "")
        head = f"\n<think>{thought}</think>"
        return head + (f"\n{content}" if content else "") + "".join("\n" + call for call in calls)

    def _call(self, tidy: bool) -> str:
        arguments: dict[str, Any] = {"city": self.words(2).strip()}
        if self.draw.random() < 0.5:
            arguments["days"] = self.draw.randrange(9)
        if not tidy and self.draw.random() < 0.2:
            return "<tool_call>\n{not a call</tool_call>"
        if self.kind == "xml":
            pairs = "".join(
                f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
            )
            return f"<tool_call>\n<function=weather>\n{pairs}</function>\n</tool_call>"
        if self.kind == "qwen":
            spelled = json.dumps(arguments, ensure_ascii=False, indent=None if tidy else 1)
            return f'<tool_call>\n{{"name": "weather", "arguments": {spelled}}}\n</tool_call>'
        space = "\n" if tidy else " "
        pairs = "".join(
            f"<arg_key>{key}</arg_key>{space}<arg_value>"
            f"{value if isinstance(value, str) else json.dumps(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        return f"<tool_call>weather\n{pairs}</tool_call>"


class Harness:
    """Sends requests to an episode.

    ``histories`` are the message lists so far, ``ended_by`` why each answer ended.
    """

    def __init__(self, episode: OpenEpisode, draw: random.Random) -> None:
        self.episode, self.draw = episode, draw
        self.histories: list[list[Body]] = []
        self.ended_by: list[str] = []
        self.tools = TOOLS if draw.random() < 0.7 else None

    async def talk(self, num_requests: int) -> None:
        """Make some requests; the limits of the episode may reject some of them."""
        self.histories.append(self._first())
        for _ in range(num_requests):
            draw = self.draw
            action = draw.random()
            history = draw.choice(self.histories)
            if action < 0.6:
                await self._ask(self._continued(self.histories[-1]))
            elif action < 0.7:
                await self._ask(self._edited(history))
            elif action < 0.8:
                await self._ask(self._continued(history[: draw.randint(1, len(history))]))
            elif action < 0.9:
                parallel = [self._continued(history) for _ in range(draw.randint(2, 3))]
                await asyncio.gather(*(self._ask(one) for one in [*parallel, parallel[0]]))
            else:
                await self._ask(self._continued(history), n=draw.randint(2, 3))

    def _first(self) -> list[Body]:
        system = [{"role": "system", "content": "Be kind."}] if self.draw.random() < 0.5 else []
        return [*system, {"role": "user", "content": "How is the weather?"}]

    def _continued(self, history: list[Body]) -> list[Body]:
        """Add tool outputs or a user message."""
        last = history[-1]
        if last["role"] == "user" and self.draw.random() < 0.9:
            return history
        if last["role"] == "assistant" and last.get("tool_calls"):
            outputs = [
                {"role": "tool", "content": f"{self.draw.random()}", "tool_call_id": call["id"]}
                for call in last["tool_calls"]
            ]
            return [*history, *outputs]
        return [*history, {"role": "user", "content": f"And {self.draw.randrange(99)}?"}]

    def _edited(self, history: list[Body]) -> list[Body]:
        """Change a message, or leave some out."""
        place = self.draw.randrange(len(history))
        if self.draw.random() < 0.5 and 0 < place < len(history) - 1:
            kept = [history[0], *history[place + 1 :]]
            return self._continued(kept)
        changed = {**history[place], "content": f"edited {self.draw.randrange(99)}"}
        changed.pop("tool_calls", None)
        return self._continued([*history[:place], changed, *history[place + 1 :]])

    async def _ask(self, messages: list[Body], **fields: Any) -> None:
        draw = self.draw
        body: Body = {"messages": messages, **fields}
        if self.tools and draw.random() < 0.95:
            body["tools"] = self.tools
        if draw.random() < 0.15:
            body["max_tokens"] = draw.randint(1, 20)
        if draw.random() < 0.15:
            body["stop"] = draw.choice(["try", [" it", "Paris"]])
        try:
            completion = await self.episode.answer(chat_request(body))
        except BadRequest:
            return
        for choice in completion.choices:
            self.ended_by.append(choice.ended_by)
            self.histories.append([*messages, self._returned(choice.message.for_openai())])

    def _returned(self, message: Body) -> Body:
        """Return a message as a harness stores it: no reasoning, trimmed, JSON reformatted."""
        kept = dict(message)
        if self.draw.random() < 0.4:
            kept.pop("reasoning_content", None)
        if isinstance(kept["content"], str) and self.draw.random() < 0.2:
            kept["content"] = kept["content"].strip()
        if self.draw.random() < 0.3:
            kept["tool_calls"] = [self._formatted(call) for call in kept.get("tool_calls", [])]
        return kept

    def _formatted(self, call: Body) -> Body:
        function = call["function"]
        arguments = json.dumps(json.loads(function["arguments"]), indent=2)
        return {**call, "function": {**function, "arguments": arguments}}
