"""Compare the real actor, Megatron-core over gloo, with Hugging Face and with other layouts.

The model is a tiny random Qwen3 made by transformers. The references are independent: logits and
gradients of transformers' model, and AdamW of torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlpost.config.tree import Config
from rlpost.types import TrainSample
from tests.contract.actor_ranks import Files, load, look_and_train, run_ranks, train
from tests.contract.samples import STEPS
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)

VOCAB_SIZE = {"untied": 96, "tied": 97}  # 97 rows need padding when sharded over two ranks
LAYOUTS = {  # name: (world size, tensor-parallel size, sequence parallel)
    "tp1": (1, 1, False),
    "tp2": (2, 2, False),
    "tp2_sp": (2, 2, True),
    "dp2": (2, 1, False),
    "tp2_dp2_sp": (4, 2, True),
}
LR, WEIGHT_DECAY, CLIP_GRAD, ADAM_EPS, TEMPERATURE, EPS_CLIP = 1e-3, 0.1, 1.0, 1e-4, 0.8, 0.2


def make_model(folder: Path, *, tied: bool) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE["tied" if tied else "untied"],
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        dtype="float32",
    )
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(config)
    # weights larger than the default, and norms that are not all one, so that errors show
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "untied", tied=False)
    make_model(folder / "tied", tied=True)
    return folder


def settings(models: Path, model: str, layout: str, **changes: Any) -> Config:
    _, tensor_parallel, sequence_parallel = LAYOUTS[layout]
    defaults = dict(
        hf_checkpoint=str(models / model),
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=sequence_parallel,
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        clip_grad=CLIP_GRAD,
        adam_eps=ADAM_EPS,
        rollout_temperature=TEMPERATURE,
        eps_clip=EPS_CLIP,
        eps_clip_high=EPS_CLIP,
        distributed_timeout_minutes=2,
        update_weight_buffer_size=40_000,
    )
    return rank_config(**(defaults | changes))


@pytest.fixture(scope="module")
def worlds(models: Path, tmp_path_factory: pytest.TempPathFactory):
    """``worlds(model, layout)``: the results of every rank of that world, and its folder.

    Each world runs once.
    """
    runs: dict[tuple[str, str], tuple[list[dict], Path]] = {}

    def get(model: str, layout: str) -> tuple[list[dict], Path]:
        if (model, layout) not in runs:
            folder = tmp_path_factory.mktemp(f"{model}_{layout}")
            results = run_ranks(
                look_and_train,
                LAYOUTS[layout][0],
                settings(models, model, layout),
                samples=STEPS[0],
                folder=str(folder),
                steps=STEPS,
            )
            runs[model, layout] = results, folder
        return runs[model, layout]

    return get


@pytest.fixture(scope="module")
def reference(models: Path):
    """``reference(model)``: results of transformers and plain torch.

    Transformers' logits and log-probs of the first samples, and the weights and metrics after
    training in plain torch: one process, one sample at a time.
    """
    from transformers import AutoModelForCausalLM

    known: dict[str, dict] = {}

    def response_logprobs(model: torch.nn.Module, sample: TrainSample) -> torch.Tensor:
        ids = torch.tensor([sample.token_ids])
        rows = model(ids).logits[0, sample.prompt_length - 1 : -1] / TEMPERATURE
        return rows.log_softmax(-1).gather(1, ids[0, sample.prompt_length :, None])[:, 0]

    def plain_step(
        model: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: list[TrainSample]
    ) -> dict:
        """With the ratio at 1 the loss is -A in value and -A grad(log-prob) in gradient."""
        optimizer.zero_grad()
        loss = torch.zeros(())
        for sample in samples:
            logprobs, mask = response_logprobs(model, sample), torch.tensor(sample.loss_mask)
            ratio = (logprobs - logprobs.detach()).exp()
            loss = loss - sample.advantage * (ratio * mask).sum() / mask.sum() / len(samples)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        optimizer.step()
        return {"train/loss": loss.item(), "train/grad_norm": norm.item()}

    def get(name: str) -> dict:
        if name not in known:
            model = AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32).eval()
            with torch.no_grad():
                rows = [model(torch.tensor([sample.token_ids])).logits[0] for sample in STEPS[0]]
                logprobs = {
                    sample: response_logprobs(model, sample).tolist() for sample in STEPS[0]
                }
            matrices = [p for p in model.parameters() if p.dim() > 1]
            vectors = [p for p in model.parameters() if p.dim() == 1]
            groups = [
                {"params": matrices, "weight_decay": WEIGHT_DECAY},
                {"params": vectors, "weight_decay": 0.0},
            ]
            optimizer = torch.optim.AdamW(groups, lr=LR, eps=ADAM_EPS)
            metrics = [plain_step(model, optimizer, samples) for samples in STEPS]
            weights = {key: value.detach() for key, value in model.state_dict().items()}
            known[name] = {
                "logits": torch.cat(rows),
                "logprobs": logprobs,
                "metrics": metrics,
                "weights": weights,
            }
        return known[name]

    return get


def largest_relative_difference(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]
) -> float:
    """Return the largest difference over all tensors, relative to each tensor's largest value."""
    return max(
        ((ours[key] - theirs[key]).abs().max() / theirs[key].abs().max()).item() for key in ours
    )


CASES = [("untied", layout) for layout in LAYOUTS] + [("tied", "tp1"), ("tied", "tp2_sp")]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_packed_logits_equal_those_of_hugging_face_one_sequence_at_a_time(
    worlds, reference, model, layout
):
    results, _ = worlds(model, layout)
    expected = reference(model)["logits"]
    for result in results:
        ours = torch.from_numpy(result["logits"])[: expected.size(0), : VOCAB_SIZE[model]]
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_response_logprobs_equal_those_of_hugging_face_at_the_same_temperature(
    worlds, reference, model, layout
):
    expected = reference(model)["logprobs"]
    seen = set()
    for result in worlds(model, layout)[0]:
        for micro_batch, logprobs in zip(
            result["batch"].micro_batches, result["logprobs"], strict=True
        ):
            for sample, ours in zip(micro_batch, logprobs, strict=True):
                assert ours == pytest.approx(expected[sample], abs=1e-5)
                seen.add(sample)
    assert seen == set(STEPS[0])


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_import_then_export_preserves_every_bit(worlds, models, model, layout):
    exported = load_file(worlds(model, layout)[1] / "imported" / "model.safetensors")
    original = load_file(models / model / "model.safetensors")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[key], original[key]) for key in original)


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_three_steps_equal_plain_torch_at_every_layout(worlds, reference, model, layout):
    results, folder = worlds(model, layout)
    expected = reference(model)
    for ours, theirs in zip(results[0]["metrics"], expected["metrics"], strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-5, abs=1e-6)
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-5)
    weights = load_file(folder / "trained" / "model.safetensors")
    assert largest_relative_difference(weights, expected["weights"]) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_and_weights_are_the_same_on_every_rank(worlds, layout):
    results, _ = worlds("untied", layout)
    assert all(result["metrics"] == results[0]["metrics"] for result in results)
    assert all(result["hash"] == results[0]["hash"] for result in results)


def test_transformers_loads_an_export_without_missing_or_unexpected_keys(worlds, reference):
    from transformers import AutoModelForCausalLM

    _, folder = worlds("tied", "tp2_sp")
    model, info = AutoModelForCausalLM.from_pretrained(folder / "trained", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32
    assert (
        largest_relative_difference(dict(model.named_parameters()), reference("tied")["weights"])
        < 1e-5
    )


def test_micro_batching_does_not_change_the_loss_or_the_step(models):
    """Per token; the loss per sample is compared with one sample at a time in plain torch."""
    one = settings(models, "untied", "tp1", calculate_per_token_loss=True)
    (packed,) = run_ranks(train, 1, one, steps=STEPS, max_tokens=200, two_passes=True)
    (single,) = run_ranks(train, 1, one, steps=STEPS, max_tokens=None, two_passes=True)
    for ours, theirs in zip(packed["metrics"], single["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert packed["metrics"][1]["train/ppo_kl"] != 0.0, "the second pass has a ratio other than 1"


@pytest.mark.parametrize("per_token", [False, True])
def test_samples_that_do_not_divide_evenly_among_ranks_train_as_on_one_rank(models, per_token):
    odd = [step[: len(step) - 1] for step in STEPS]
    assert all(len(step) % 2 for step in odd)
    changes = {"calculate_per_token_loss": per_token}
    (alone,) = run_ranks(train, 1, settings(models, "untied", "tp1", **changes), steps=odd)
    for on_a_rank in run_ranks(train, 2, settings(models, "untied", "dp2", **changes), steps=odd):
        for ours, theirs in zip(on_a_rank["metrics"], alone["metrics"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("model", "layout"), [("untied", "tp1"), ("untied", "tp2_dp2_sp"), ("tied", "tp2_sp")]
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(worlds, models, model, layout):
    whole, folder = worlds(model, layout)
    saved = str(folder / "saved")
    same = settings(models, model, layout)
    resumed = run_ranks(train, LAYOUTS[layout][0], same, steps=STEPS, files=Files(load=saved))
    assert [result["metrics"] for result in resumed] == [result["metrics"][2:] for result in whole]
    assert resumed[0]["hash"] == whole[0]["hash"]


@pytest.mark.parametrize(
    ("model", "written_at", "read_at"),
    [("untied", "tp2_dp2_sp", "tp1"), ("tied", "tp2_sp", "dp2")],
)
def test_a_checkpoint_resumes_at_another_layout(
    worlds, models, tmp_path, model, written_at, read_at
):
    whole, folder = worlds(model, written_at)
    there = settings(models, model, read_at)
    files = Files(load=str(folder / "saved"), export=str(tmp_path))
    continued = run_ranks(train, LAYOUTS[read_at][0], there, steps=STEPS, files=files)
    assert continued[0]["metrics"] == [pytest.approx(whole[0]["metrics"][2], rel=1e-5, abs=1e-6)]
    weights = load_file(tmp_path / "model.safetensors")
    assert (
        largest_relative_difference(weights, load_file(folder / "trained" / "model.safetensors"))
        < 1e-5
    )


def test_the_settings_of_the_new_attempt_override_those_in_the_checkpoint(worlds, models, tmp_path):
    _, folder = worlds("untied", "tp1")
    still = settings(models, "untied", "tp1", lr=1e-30)
    for name, steps in (("loaded", STEPS[:2]), ("later", STEPS)):
        run_ranks(
            train,
            1,
            still,
            steps=steps,
            files=Files(load=str(folder / "saved"), export=str(tmp_path / name)),
        )
    before, after = (
        load_file(tmp_path / name / "model.safetensors") for name in ("loaded", "later")
    )
    assert largest_relative_difference(after, before) < 1e-7


def test_a_folder_without_a_checkpoint_or_with_another_models_is_refused(worlds, models, tmp_path):
    (said,) = run_ranks(load, 1, settings(models, "untied", "tp1"), folder=str(tmp_path))
    assert said.startswith(f"{tmp_path} cannot be loaded into this model")
    _, folder = worlds("tied", "tp1")
    (said,) = run_ranks(load, 1, settings(models, "untied", "tp1"), folder=str(folder / "saved"))
    assert said.startswith(f"{folder / 'saved'} cannot be loaded into this model")


def test_a_layout_that_does_not_fit_is_refused_before_anything_starts(models):
    with pytest.raises(
        AssertionError, match=r"ConfigError: --tensor-model-parallel-size 4 does not divide num_key"
    ):
        run_ranks(
            train, 1, settings(models, "untied", "tp1", tensor_model_parallel_size=4), steps=STEPS
        )
    with pytest.raises(
        AssertionError,
        match=r"PlacementError: --tensor-model-parallel-size 2 does not divide the 1 ranks",
    ):
        run_ranks(train, 1, settings(models, "untied", "tp2"), steps=STEPS)
