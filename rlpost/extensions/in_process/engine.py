"""An engine in this process: transformers generates, for all requests that wait at a time.

Input: requests as an engine of SGLang gets them, and tensors under their Hugging Face names.
Output: answers with the log-prob of each token and the version of the weights.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from rlpost.columns import FloatColumn, IntColumn
from rlpost.engines.answer import Answer
from rlpost.engines.connection import Connection, Halted, RunEngines, Watch
from rlpost.engines.image_requests import ImageRequests
from rlpost.engines.routes import RouteFormat
from rlpost.errors import ConfigError
from rlpost.types import ImageSpan

SAMPLING = frozenset({"max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids"})
IGNORED = frozenset({"sampling_seed"})
"""Parameters of deterministic engines; here torch draws all answers of a batch."""
Decode = Callable[[Sequence[int]], str]
"""Returns the text of token ids, without special tokens."""


@dataclass(frozen=True, slots=True)
class _Request:
    input_ids: Sequence[int]
    params: Mapping[str, Any]
    answered: asyncio.Future[Answer]

    @property
    def sampling(self) -> tuple[float, float, int, tuple[int, ...]]:
        """Return what all requests of one pass share: temperature, top-p, top-k, stop ids."""
        params = self.params
        ends = tuple(params["stop_token_ids"] or ())
        return params["temperature"], params["top_p"], params["top_k"], ends


class InProcessEngine:
    """A model that generates, with the weights of one version."""

    def __init__(
        self, folder: Path, *, decode: Decode, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Load the model of ``folder``; the first ``update`` brings the weights of a version."""
        self._decode = decode
        self._lock = threading.Lock()
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        # Without the folder's generation_config.json, which would change how tokens are sampled.
        self._model.generation_config = GenerationConfig()
        self._waiting: list[_Request] = []
        self._generating: asyncio.Task[None] | None = None
        self.version: int | None = None
        """Of the weights; None before the first ``update``."""

    def update(self, parts: Iterable[Mapping[str, torch.Tensor]], version: int) -> None:
        """Take the weights of ``version``, in parts by Hugging Face name, in the trainer's dtypes.

        Waits for the answers that are being generated: each is of one version.
        """
        own = self._model.state_dict()
        with self._lock, torch.no_grad():
            for tensors in parts:
                for name, tensor in tensors.items():
                    if own[name].dtype != tensor.dtype:  # transformers rounds all to one dtype
                        weight = self._model.get_parameter(name)
                        weight.data = own[name] = weight.data.to(tensor.dtype)
                    own[name].copy_(tensor)
            self.version = version

    async def generate(
        self, input_ids: Sequence[int], sampling_params: Mapping[str, object]
    ) -> Answer:
        """Return one answer; requests of one turn of the event loop are generated together.

        Raises ConfigError for a sampling parameter that this engine does not have.
        """
        for name, value in sampling_params.items():
            if value and name not in SAMPLING | IGNORED:
                raise ConfigError(
                    f"{name} = {value!r}: a run in one process does not have it; use rlpost submit "
                    "RECIPE --local"
                )
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(input_ids, sampling_params, answered))
        if self._generating is None or self._generating.done():
            self._generating = asyncio.create_task(self._generate_waiting())
        return await answered

    async def _generate_waiting(self) -> None:
        """Answer requests until none waits."""
        while True:
            num_before = -1
            while num_before < len(self._waiting):  # groups begin one turn after the other
                num_before = len(self._waiting)
                for _ in range(4):
                    await asyncio.sleep(0)
            if not self._waiting:
                return
            first = self._waiting[0].sampling
            batch = [request for request in self._waiting if request.sampling == first]
            self._waiting = [request for request in self._waiting if request.sampling != first]
            try:
                answers = await asyncio.to_thread(self._answer, batch)
            except Exception as error:
                for request in batch:
                    if not request.answered.done():
                        request.answered.set_exception(error)
                continue
            for request, answer in zip(batch, answers, strict=True):
                if not request.answered.done():  # its caller may have been cancelled
                    request.answered.set_result(answer)

    @torch.no_grad()
    def _answer(self, batch: Sequence[_Request]) -> list[Answer]:
        """Generate the answers of requests with one set of sampling parameters."""
        temperature, top_p, top_k, ends = batch[0].sampling
        is_greedy = temperature == 0.0  # the log-probs are then those at 1, as SGLang's
        width = max(len(request.input_ids) for request in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        attended = torch.zeros_like(ids)
        for row, request in enumerate(batch):  # padding is on the left
            prompt_ids = torch.tensor(list(request.input_ids))
            ids[row, width - len(prompt_ids) :] = prompt_ids
            attended[row, width - len(prompt_ids) :] = 1
        device = self._model.device
        sampled = {"temperature": temperature, "top_p": top_p, "top_k": max(top_k, 0)}
        with self._lock:
            version = self.version
            out = self._model.generate(
                input_ids=ids.to(device),
                attention_mask=attended.to(device),
                max_new_tokens=max(request.params["max_new_tokens"] for request in batch),
                do_sample=not is_greedy,
                **({} if is_greedy else sampled),
                eos_token_id=list(ends) or None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        assert version is not None, "the first update comes before the first request"
        logits = torch.stack(out.logits, 1).float() / (1.0 if is_greedy else temperature)
        new_ids = out.sequences[:, width:]
        logprobs = logits.log_softmax(-1).gather(-1, new_ids[..., None])[..., 0]
        rows = zip(batch, new_ids.tolist(), logprobs.tolist(), strict=True)
        return [self._answer_of(*row, version) for row in rows]

    def _answer_of(
        self,
        request: _Request,
        new_ids: Sequence[int],
        logprobs: Sequence[float],
        version: int,
    ) -> Answer:
        """Return the tokens of one row up to its end; a batch is padded to its longest answer."""
        ends, limit = request.sampling[3], request.params["max_new_tokens"]
        length = next((at + 1 for at, token in enumerate(new_ids) if token in ends), len(new_ids))
        is_stopped = length <= limit and new_ids[length - 1] in ends
        length = min(length, limit)
        reason: dict[str, Any] = {"type": "length", "length": length}
        if is_stopped:
            reason = {"type": "stop", "matched": new_ids[length - 1]}
        return Answer(
            token_ids=IntColumn(new_ids[:length]),
            logprobs=FloatColumn(logprobs[:length]),
            text=self._decode(new_ids[: length - is_stopped]),
            finish_reason=reason,
            version_spans=((version, length),),
            meta_info={},
        )


class InProcessConnection(Connection):
    """Requests to an engine in this process."""

    def __init__(
        self,
        engine: InProcessEngine,
        engines: RunEngines,
        *,
        routes: RouteFormat | None = None,
        images: ImageRequests | None = None,
    ) -> None:
        super().__init__(engines, routes=routes, images=images)
        self._engine = engine

    async def generate(
        self,
        what: str,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, object],
        *,
        images: Sequence[ImageSpan] = (),
        fields: Mapping[str, object] | None = None,
        prompt: Hashable = None,
        turn_of: Hashable = None,
        watch: Watch | None = None,
    ) -> Answer:
        """See ``Connection``. Raises Halted."""
        del what, images, fields, prompt, turn_of, watch
        if self.halted:
            raise Halted
        return await self._engine.generate(input_ids, sampling_params)
