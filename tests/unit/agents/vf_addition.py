"""A verifiers taskset whose harness runs in the test's process."""

from __future__ import annotations

import aiohttp
import verifiers.v1 as vf

__all__ = ["AdditionHarness", "AdditionTaskset"]


class Addition(vf.TaskData):
    answer: str


class AdditionTask(vf.Task[Addition]):
    @vf.reward
    async def is_right(self, trace) -> float:
        if self.data.answer == "?":
            raise ValueError("the grader broke")
        return float(trace.info["reply"].strip() == self.data.answer)


class AdditionTaskset(vf.Taskset[AdditionTask, vf.TasksetConfig]):
    def load(self):
        for prompt, answer in (("Q:07+05=", "12"), ("Q:01+01=", "2"), ("Q:?", "?")):
            yield AdditionTask(Addition(prompt=prompt, answer=answer), self.config.task)


class AdditionHarness(vf.Harness[vf.HarnessConfig]):
    """Asks one question and returns the answer."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ):
        question = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"{endpoint}/chat/completions",
                json=question,
                headers={"Authorization": f"Bearer {secret}"},
            ) as answer,
        ):
            answer.raise_for_status()
            message = (await answer.json())["choices"][0]["message"]
        trace.info["reply"] = message["content"]
        return vf.ProgramResult(0, message["content"], "")
