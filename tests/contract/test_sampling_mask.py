"""Log-probs and entropies under sampling masks in the real actor, against transformers' warpers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpost.types import TrainSample
from tests.contract.actor_ranks import my_batch, run_ranks
from tests.contract.samples import STEPS
from tests.contract.test_actor import make_model
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)

TEMPERATURE, TOP_K, TOP_P, REF_COEF = 0.8, 20, 0.9, 0.2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masks") / "model"
    make_model(folder, tied=False)
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[list[TrainSample], list[float], list[float]]:
    """Return samples with transformers' masks, and log-probs and entropies over them.

    The masks are those of transformers' warpers. A response token that they remove stays in its
    mask, as a sampled token always does.
    """
    from transformers import AutoModelForCausalLM, TopKLogitsWarper, TopPLogitsWarper

    hugging_face = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    samples, logprobs, entropies = [], [], []
    for sample in STEPS[0]:
        ids = torch.tensor(list(sample.token_ids))
        with torch.no_grad():
            rows = hugging_face(ids[None]).logits[0, sample.prompt_length - 1 : -1] / TEMPERATURE
        removed = TopKLogitsWarper(TOP_K)(None, rows).isinf()
        removed |= TopPLogitsWarper(TOP_P)(None, rows).isinf()
        targets = ids[sample.prompt_length :, None]
        removed.scatter_(1, targets, False)
        of_rows = torch.distributions.Categorical(logits=rows.masked_fill(removed, -torch.inf))
        logprobs.append(of_rows.log_prob(targets[:, 0]))
        entropies.append(of_rows.entropy())
        sets = [(~row).nonzero()[:, 0].tolist() for row in removed]
        assert max(map(len, sets)) <= TOP_K + 1
        samples.append(replace(sample, sampling_mask=sets, rollout_logprobs=logprobs[-1].tolist()))
    kept = torch.cat([torch.tensor(list(sample.loss_mask)) for sample in samples]).bool()
    return samples, [each.tolist() for each in logprobs], torch.cat(entropies)[kept].tolist()


def passes(actor: Any, *, samples: list[TrainSample]) -> dict[str, Any]:
    actor.import_weights()
    batch = my_batch(actor, samples, max_tokens=64)
    own, ref = actor.compute_logprobs(batch), actor.compute_ref_logprobs(batch)
    metrics = dict(actor.train_step(batch, own).metrics)
    again = actor.compute_ref_logprobs(batch)
    return {"samples": batch.samples, "own": own, "ref": ref, "again": again, "metrics": metrics}


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"context_parallel_size": 2},
    ],
    ids=["tp1", "tp2_sp", "cp2"],
)
def test_all_log_probs_are_over_the_mask_at_every_layout(model, expected, layout):
    samples, logprobs, entropies = expected
    settings = rank_config(
        str(model),
        lr=1e-3,
        rollout_temperature=TEMPERATURE,
        distributed_timeout_minutes=2,
        use_kl_loss=True,
        kl_loss_coef=REF_COEF,
        kl_loss_type="k1",
        use_rollout_sampling_mask=True,
        **layout,
    )
    *_, found = run_ranks(passes, 2 if layout else 1, settings, samples=samples)
    of_ids = {sample.token_ids: own for sample, own in zip(samples, logprobs, strict=True)}
    for pass_name in ("own", "ref", "again"):
        columns = [column for micro in found[pass_name] for column in micro]
        for sample, column in zip(found["samples"], columns, strict=True):
            assert column == pytest.approx(of_ids[sample.token_ids], abs=2e-4), pass_name
    metrics = found["metrics"]
    assert metrics["train/entropy"] == pytest.approx(sum(entropies) / len(entropies), abs=1e-4)
    assert metrics["train/ref_kl"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["train/rollout_logprob_abs_diff"] == pytest.approx(0.0, abs=1e-4)
