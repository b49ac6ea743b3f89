"""A pretrained model, SmolLM2-135M-Instruct: actor, engine and exports beside transformers.

The model is loaded, trained and served in float32. Logits are compared at tokens of chat prompts
with their right answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from rlpost.config.tree import Config
from rlpost.engines.engine_client import EngineClient
from rlpost.engines.engine_side_weights import DiskMover, WeightUpdate
from rlpost.extensions.fetching.arithmetic_data import problems
from rlpost.tasks.tokenizer import PromptTokenizer, eos_token_ids
from rlpost.types import EngineAddress, TrainSample
from tests.contract.actor_ranks import run_ranks
from tests.contract.forked.forked_sglang import ForkedSglang
from tests.contract.layouts import tp
from tests.contract.pretrained_ranks import imported_logits, logits_and_export
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(900)
KEY, MAX_NEW = "pretrained-key", 12
LIMIT = 1e-4
"""Largest difference of logits, relative to the largest logit where that exceeds 1."""
STEPS = 2
Answer = tuple[list[int], list[float]]


@pytest.fixture(scope="module")
def prompts(pretrained: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Twenty questions: the right answer and the token ids of the chat prompt."""
    tokenize = PromptTokenizer(pretrained, apply_chat_template=True)
    _, held_out = problems(seed=0, form="questions")
    return [(each["label"], tokenize(each["prompt"])[1]) for each in held_out[:20]]


@pytest.fixture(scope="module")
def samples(pretrained: Path, prompts: list[tuple[str, tuple[int, ...]]]) -> list[TrainSample]:
    """Three questions with their answers; one has a negative advantage."""
    encode, (end,) = PromptTokenizer(pretrained).encode, eos_token_ids(pretrained)
    made = []
    for (label, prompt), advantage in zip(prompts, (1.0, -0.5, 0.5), strict=False):
        answer = (*encode(label), end)
        made.append(
            TrainSample(
                token_ids=prompt + answer,
                prompt_length=len(prompt),
                loss_mask=(1,) * len(answer),
                rollout_logprobs=(-1.0,) * len(answer),
                advantage=advantage,
            )
        )
    return made


@pytest.fixture(scope="module")
def theirs(pretrained: Path) -> Any:
    return load(pretrained)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pretrained") / "exported"


@pytest.fixture(scope="module")
def ours(pretrained: Path, samples: list[TrainSample], exported: Path) -> dict[str, np.ndarray]:
    """Logits of an actor of one process before and after training, which it exports."""
    (found,) = run_ranks(
        logits_and_export,
        1,
        settings(pretrained),
        samples=samples,
        num_steps=STEPS,
        export=str(exported),
    )
    return found


@pytest.fixture(scope="module")
def engine(
    forked: ForkedSglang, pretrained: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineAddress]:
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    yield forked.start(pretrained, KEY, log, max_total_tokens=4096, context_length=256)
    forked.stop()


def settings(folder: Path, **more: Any) -> Config:
    return rank_config(str(folder), **{"lr": 1e-4, "distributed_timeout_minutes": 2, **more})


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits_of(model: Any, samples: list[TrainSample]) -> np.ndarray:
    """Return logits [T, vocabulary] of the samples, computed one after another."""
    rows = [model(torch.tensor([sample.token_ids])).logits[0].numpy() for sample in samples]
    return np.concatenate(rows)


def assert_equal(found: np.ndarray, expected: np.ndarray) -> None:
    difference = np.abs(found[: len(expected)] - expected).max()
    assert difference < LIMIT * max(1.0, np.abs(expected).max()), difference


def test_logits_of_the_actor_equal_those_of_transformers(theirs, ours, samples):
    assert_equal(ours["before"], logits_of(theirs, samples))


def test_three_tensor_parallel_ranks_compute_the_same_and_two_are_refused(
    pretrained, theirs, samples
):
    """Nine heads and three groups of keys divide by three, not by two."""
    with pytest.raises(AssertionError, match="2 does not divide num_attention_heads = 9"):
        run_ranks(imported_logits, 2, settings(pretrained, **tp(2)), samples=samples)
    expected = logits_of(theirs, samples)
    for found in run_ranks(imported_logits, 3, settings(pretrained, **tp(3)), samples=samples):
        assert_equal(found, expected)


async def _answers(address: EngineAddress, prompts: list[tuple[int, ...]], end: int) -> Any:
    sampling = {"temperature": 0.0, "max_new_tokens": MAX_NEW, "stop_token_ids": [end]}
    body = {
        "input_ids": [list(prompt) for prompt in prompts],
        "sampling_params": sampling,
        "return_logprob": True,
    }
    return await EngineClient(address.url, KEY, timeout_s=300).request("POST", "/generate", body)


def answers_of_engine(address: EngineAddress, prompts: Any, end: int) -> list[Answer]:
    """Return greedy answers with their log-probs."""
    said = asyncio.run(_answers(address, [prompt for _, prompt in prompts], end))
    columns = [one["meta_info"]["output_token_logprobs"] for one in said]
    return [([entry[1] for entry in one], [entry[0] for entry in one]) for one in columns]


@torch.no_grad()
def answers_of_transformers(model: Any, prompts: Any, end: int) -> list[Answer]:
    """Return greedy answers of ``generate``, each to its end token, with their log-probs.

    Prompts of one length are one batch, so none is padded.
    """
    found: dict[tuple[int, ...], Answer] = {}
    for length in {len(prompt) for _, prompt in prompts}:
        batch = [prompt for _, prompt in prompts if len(prompt) == length]
        ids = torch.tensor(batch)
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_NEW,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        columns = torch.stack(made.logits, 1).log_softmax(-1)
        for prompt, row, logprobs in zip(batch, made.sequences.tolist(), columns, strict=True):
            response = row[length:]
            if end in response:
                response = response[: response.index(end) + 1]
            found[prompt] = response, logprobs[range(len(response)), response].tolist()
    return [found[prompt] for _, prompt in prompts]


def assert_same_answers(found: list[Answer], expected: list[Answer]) -> None:
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


def test_greedy_answers_of_an_engine_are_those_of_generate(engine, pretrained, theirs, prompts):
    """Answers end at the end token of generation_config.json."""
    (end,) = eos_token_ids(pretrained)
    expected = answers_of_transformers(theirs, prompts, end)
    assert any(ids[-1] == end for ids, _ in expected)
    assert_same_answers(answers_of_engine(engine, prompts, end), expected)


def test_an_export_after_training_is_the_actor_in_transformers_and_in_an_engine(
    engine, pretrained, ours, exported, samples, prompts
):
    """Tied embeddings stay tied: the folder has one tensor for both.

    The engine of the test before reads the folder.
    """
    assert np.abs(ours["after"] - ours["before"]).max() > 0.1
    with safe_open(exported / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in set(file.keys())
    model = load(exported)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert json.loads((exported / "config.json").read_text())["tie_word_embeddings"] is True
    assert_equal(ours["after"], logits_of(model, samples))

    async def write(version: int) -> str:
        return str(exported)

    whole = WeightUpdate([engine], api_key=KEY, timeout_s=120)
    asyncio.run(whole.update(1, DiskMover(write)))
    (end,) = eos_token_ids(pretrained)
    expected = answers_of_transformers(model, prompts[:5], end)
    assert_same_answers(answers_of_engine(engine, prompts[:5], end), expected)
