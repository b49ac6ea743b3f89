"""The experts that a real SGLang engine returns.

They are compared with those that transformers chooses. The model has a dense layer before its MoE
layers. Two versions of its weights choose differently, so a token shows which of them routed it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlpost.columns import RouteColumn
from rlpost.driver.batches import train_samples
from rlpost.engines.answer_routes import AnswerRoutes
from rlpost.engines.connection import Connection, RunEngines
from rlpost.engines.engine_client import EngineClient
from rlpost.engines.engine_side_weights import DiskMover, PauseMode, WeightUpdate
from rlpost.engines.routes import RouteFormat
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import EngineAddress, Prompt, Sample, SampleGroup, ScoredSample
from tests.contract.actor_ranks import run_ranks, train
from tests.contract.families import make_family
from tests.contract.forked.forked_sglang import ForkedSglang
from tests.settings import rank_config

KEY = "routes-key-17"
FORM = RouteFormat(layers=(1, 2, 3), num_layers=4, num_experts=8, topk=2)
PROMPTS = [Prompt(index, "", (5 + index, 6, 7, 8 + index)) for index in range(6)]
P = 4
DEADLINE_S = 300
LONG = SamplingParams(max_new_tokens=200)
TIE = 1e-4
"""Scores closer than this are equal: engine and transformers sum in different orders."""


@dataclass(frozen=True)
class Mixture:
    """An engine, and the folders of two versions of its weights."""

    serving: RunEngines
    address: EngineAddress
    folders: tuple[Path, Path]


@pytest.fixture(scope="module")
def mixture(forked: ForkedSglang, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixture]:
    folder = tmp_path_factory.mktemp("mixture")
    first, second = folder / "first", folder / "second"
    make_family(first, "glm4.5-moe")
    change_weights(first, second)
    log = folder / "engine.log"
    address = forked.start(first, KEY, log, enable_return_routed_experts=True)
    yield Mixture(RunEngines.of([address.url], KEY, capacity=64), address, (first, second))
    forked.stop()


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def change_weights(source: Path, target: Path) -> None:
    model = load(source)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "mlp" in name:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(target)


@torch.no_grad()
def scores_of(folder: Path, token_ids: list[int]) -> np.ndarray:
    """Return the scores by which transformers chooses, [tokens, MoE layers, experts]."""
    model, found = load(folder), []
    for layer in FORM.layers:
        gate = model.model.layers[layer].mlp.gate

        def keep(module: Any, inputs: Any, logits: Any) -> None:
            found.append(logits.sigmoid() + module.e_score_correction_bias)

        gate.register_forward_hook(keep)
    model(torch.tensor([token_ids]))
    return torch.stack(found, 1).numpy()


def chosen_by(scores: np.ndarray, routes: RouteColumn) -> np.ndarray:
    """Tell for each token, as [tokens] bool, whether all its experts are among the best."""
    own = np.take_along_axis(scores[: len(routes)], routes.array.astype(np.int64), axis=-1)
    last_chosen = np.sort(scores[: len(routes)], axis=-1)[..., -FORM.topk]
    return (own.min(-1) > last_chosen - TIE).all(-1)


def ids_of(sample: Sample) -> list[int]:
    return [*sample.prompt_ids, *sample.response_ids]


async def written(
    connection: Connection, prompt: Prompt, sampling: SamplingParams = LONG
) -> Sample:
    builder = ResponseBuilder(connection, prompt, sampling)
    await builder.write()
    return builder.sample()


def test_routes_are_those_of_transformers(mixture: Mixture) -> None:
    """Routes of prompts, of answers, and of a prompt that the engine has in its cache."""

    async def whole() -> list[Sample]:
        async with Connection(mixture.serving, routes=FORM) as connection:
            sampling = SamplingParams(max_new_tokens=30)
            first = await asyncio.gather(
                *(written(connection, prompt, sampling) for prompt in PROMPTS)
            )
            return [
                *first,
                *await asyncio.gather(
                    *(written(connection, prompt, sampling) for prompt in PROMPTS)
                ),
            ]

    for sample in asyncio.run(whole()):
        assert sample.routes is not None and sample.routes.array.dtype == np.uint8
        # the engine never reads the last token, so it has no routes
        assert len(sample.routes) == P + len(sample.response_ids) - 1
        assert chosen_by(scores_of(mixture.folders[0], ids_of(sample)), sample.routes).all()


async def until_running(mixture: Mixture, answers: list[asyncio.Task[Any]]) -> None:
    """Wait until the engine generates answers and has generated some tokens of them, or until they
    have ended: between two queries a fast engine may begin and end all.
    """
    engine = EngineClient(mixture.address.url, KEY)
    while not all(answer.done() for answer in answers):
        (load,) = (await engine.request("GET", "/v1/loads", None))["loads"]
        if load["num_running_reqs"]:
            break
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)


def is_cut(spans: tuple[tuple[int, int], ...]) -> bool:
    """Tell whether both versions wrote enough tokens that their choices must differ somewhere."""
    return len(spans) > 1 and all(count >= 8 for _, count in spans)


def updated_amid(mixture: Mixture, pause: PauseMode, write: Any) -> list[tuple[Prompt, Any]]:
    """Update the weights while answers are generated; return the answers of both versions.

    Returns the prompts, and what ``write`` returned for them. The weights change from the first to
    the second version; at the end the engine has the first again.
    """
    update = WeightUpdate([mixture.address], api_key=KEY, timeout_s=60)

    def mover(folder: Path) -> DiskMover:
        async def prepare(version: int) -> str:
            return str(folder)

        return DiskMover(prepare)

    async def whole() -> list[tuple[Prompt, Any]]:
        async with (
            Connection(mixture.serving, routes=FORM) as connection,
            asyncio.timeout(DEADLINE_S),
        ):
            met: list[Any] = []
            while not met:  # all answers may have ended before the update
                tasks = [asyncio.create_task(write(connection, prompt)) for prompt in PROMPTS]
                await until_running(mixture, tasks)
                await update.update(1, mover(mixture.folders[1]), pause=pause)
                pairs = zip(PROMPTS, await asyncio.gather(*tasks), strict=True)
                met = [(prompt, found) for prompt, found in pairs if is_cut(found.version_spans)]
                await update.update(0, mover(mixture.folders[0]), pause=pause)
            return met

    return asyncio.run(whole())


@torch.no_grad()
def change_choice(source: Path, target: Path) -> None:
    """Change which experts are chosen, and nothing else.

    The bias has no part in the probabilities.
    """
    model = load(source)
    torch.manual_seed(3)
    for layer in FORM.layers:
        model.model.layers[layer].mlp.gate.e_score_correction_bias.add_(
            torch.randn(FORM.num_experts) * 0.3
        )
    model.save_pretrained(target)


def test_with_replay_a_trainer_with_other_routers_has_the_log_probs_of_the_engine(
    mixture: Mixture, tmp_path
) -> None:
    change_choice(mixture.folders[0], tmp_path / "trainer")

    async def whole() -> list[Sample]:
        async with Connection(mixture.serving, routes=FORM) as connection:
            sampling = SamplingParams(max_new_tokens=30)
            return await asyncio.gather(
                *(written(connection, prompt, sampling) for prompt in PROMPTS)
            )

    samples = asyncio.run(whole())
    group = SampleGroup(0, tuple(ScoredSample(sample, 0.0) for sample in samples))
    to_train = train_samples(group, [1.0] * len(samples))

    def metrics_of(replays: bool) -> dict[str, float]:
        settings = rank_config(str(tmp_path / "trainer"), use_rollout_routing_replay=replays)
        (found,) = run_ranks(train, 1, settings, steps=[to_train])
        return found["metrics"][0]

    without, replayed = metrics_of(False), metrics_of(True)
    num_read = sum(len(sample.routes) for sample in samples if sample.routes is not None)
    num_tokens = sum(len(sample.token_ids) for sample in to_train)
    assert replayed["train/routing_replayed_frac"] == pytest.approx(num_read / num_tokens)
    assert replayed["train/routing_diff_frac"] > 0.1
    assert replayed["train/rollout_logprob_abs_diff"] < 1e-4
    assert without["train/rollout_logprob_abs_diff"] > 0.1


def test_an_answer_aborted_by_an_update_keeps_the_routes_of_the_old_weights(
    mixture: Mixture,
) -> None:
    for _, sample in updated_amid(mixture, "abort", written):
        (version, num_old), _ = sample.version_spans
        assert version == 0
        read_by_old = P + num_old - 1
        old, new = (
            chosen_by(scores_of(folder, ids_of(sample)), sample.routes)
            for folder in mixture.folders
        )
        assert old[:read_by_old].all() and new[read_by_old:].all()
        assert not old[read_by_old:].all() and not new[:read_by_old].all(), (
            "the weights choose differently"
        )


def test_an_answer_retracted_by_an_update_loses_the_routes_of_the_old_weights(
    mixture: Mixture,
) -> None:
    """SGLang returns the new weights' choice for tokens that the old weights wrote.

    These routes count as unknown.
    """

    async def asked(connection: Connection, prompt: Prompt) -> Any:
        return await connection.generate(
            "it",
            prompt.token_ids,
            LONG.to_sglang(),
            fields={"return_routed_experts": True, "routed_experts_start_len": 0},
        )

    for prompt, answer in updated_amid(mixture, "retract", asked):
        (version, num_old), _ = answer.version_spans
        assert version == 0
        read_by_old, ids = P + num_old - 1, [*prompt.token_ids, *answer.token_ids]
        assert chosen_by(scores_of(mixture.folders[1], ids), answer.routes).all()
        assert not chosen_by(scores_of(mixture.folders[0], ids), answer.routes)[:read_by_old].all()
        collected = AnswerRoutes(FORM)
        collected.add(answer, num_read=len(ids) - 1)
        assert not collected.column().known[:read_by_old].any()
        assert collected.column()[read_by_old : len(ids)] == answer.routes[read_by_old : len(ids)]
