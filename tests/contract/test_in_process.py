"""A run in this process: the same loop and rank as a run's, with transformers as the engine."""

import gc
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import rlpost
from rlpost import ConfigError
from rlpost.extensions.in_process.engine import InProcessEngine
from tests.contract.families import load_folder
from tests.contract.float32_ranks import make_published
from tests.left_descriptors import open_descriptors

ROOT = Path(__file__).parents[2]
SMALL = {"rollout_batch_size": 4, "n_samples_per_prompt": 4}
RETRY = """
from rlpost import Step


class Retry:
    def reset(self, prompt):
        self.label = prompt.label

    def step(self, turn):
        return Step("=", reward=float(turn.number), done=turn.number == 1)
"""


def open_run(**settings):
    return rlpost.InProcessRun("tiny", **SMALL | settings)


def test_the_lines_of_the_first_page_train_a_step():
    (code,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/index.md").read_text(), re.M | re.S
    )
    names = {}
    exec(code, names)
    step, run = names["step"], names["run"]
    try:
        assert step.number == 1 and len(step.samples) == 32 * 8
        rewards = [scored.reward for scored in step.samples]
        assert step.metrics["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
        assert step.metrics["train/lr"] == 1e-3 and step.metrics["train/grad_norm"] > 0
        right = next(scored for scored in step.samples if scored.reward == 1)
        assert right.sample.text == right.sample.label
    finally:
        run.close()


def test_engine_and_rank_agree_about_every_token_before_and_after_updates():
    with open_run(rollout_top_p=0.9, rollout_temperature=0.8) as run:
        for _ in range(3):
            metrics = run.step().metrics
            # the ratio is over the full vocabulary at this temperature, for both
            assert metrics["train/rollout_logprob_abs_diff"] < 1e-5
            assert metrics["rollout/staleness_max"] == 0
        assert run.evaluate()["eval/heldout/reward_mean"] > 0


def test_the_engine_takes_weights_in_the_dtypes_of_the_rank(tmp_path):
    """transformers loads the float32 weights of a folder in bfloat16 rounded."""
    make_published(tmp_path / "model", "qwen3.5")
    engine = InProcessEngine(
        tmp_path / "model", decode=str, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    stored = load_folder(tmp_path / "model")
    engine.update([stored], 1)
    held = engine._model.state_dict()
    assert all(
        held[name].dtype == one.dtype and held[name].equal(one) for name, one in stored.items()
    )


def test_the_engines_log_probs_are_those_of_the_model_alone(tmp_path):
    """The first step's answers, one by one and without padding, under the weights of the folder."""
    rows = [{"prompt": "7" * length + "+1=", "label": "8"} for length in (1, 2, 3, 5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with open_run(prompt_data=[f"{tmp_path}/rows.jsonl"]) as run:
        samples = [scored.sample for scored in run.step().samples]
        model = AutoModelForCausalLM.from_pretrained(run.config.checkpoint.hf_checkpoint).eval()
    assert len({len(sample.prompt_ids) for sample in samples}) > 1, "nothing was padded"
    for sample in samples:
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
        ours = logprobs.gather(-1, ids[0, 1:, None])[-len(sample.response_ids) :, 0]
        torch.testing.assert_close(
            torch.tensor(list(sample.rollout_logprobs)), ours, atol=2e-5, rtol=0
        )


def test_the_same_seed_gives_the_same_step_and_a_second_run_needs_the_first_closed():
    """A closed run keeps neither weights nor sockets, although its object stays."""
    runs, models = [], num_models()

    def answers():
        with open_run() as run:
            runs.append(run)
            with pytest.raises(ConfigError, match="another run is open"):
                open_run()
            return [scored.sample.response_ids for scored in run.step().samples]

    first = answers()
    held = len(open_descriptors())
    assert first == answers() and not dist.is_initialized()
    assert len(open_descriptors()) <= held and num_models() <= models


def num_models():
    return sum(type(each).__name__ == "GPTModel" for each in gc.get_objects())


def test_a_reward_and_an_environment_of_the_shell_are_used(tmp_path):
    with open_run(reward=lambda text, label, metadata: len(text)) as run:
        assert all(one.reward == len(one.sample.text) for one in run.step().samples)
    (tmp_path / "task.py").write_text(RETRY)
    with open_run(env=f"{tmp_path}/task.py:Retry") as run:
        samples = run.step().samples
        assert {scored.reward for scored in samples} == {1.0}
        assert all(0 in list(scored.sample.loss_mask) for scored in samples), "its text is trained"


def test_a_reward_that_raises_ends_the_step_with_its_own_error():
    def broken(text, label, metadata):
        raise KeyError("no such field")

    with open_run(reward=broken) as run, pytest.raises(KeyError, match="no such field"):
        run.step()
    assert not dist.is_initialized()


def test_no_step_follows_the_last():
    with open_run(num_rollout=1) as run:
        run.step()
        with pytest.raises(ConfigError, match="all 1 steps are trained"):
            run.step()


def test_a_run_begins_with_the_weights_of_its_rank_and_samples_as_the_settings_say(tmp_path):
    """Another --ref-load, and a folder whose generation_config.json would change sampling."""
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "assets/tiny", folder)
    (folder / "generation_config.json").write_text('{"min_p": 0.99, "repetition_penalty": 1.5}')
    tensors = load_file(folder / "model.safetensors")
    norm = next(name for name in tensors if name.endswith("q_proj.weight"))
    save_file(tensors | {norm: tensors[norm] * 1.5}, folder / "model.safetensors", {"format": "pt"})
    with open_run(hf_checkpoint=str(folder), ref_load=str(ROOT / "assets/tiny")) as run:
        step = run.step()
    assert step.metrics["train/rollout_logprob_abs_diff"] < 1e-5
    assert len({scored.sample.response_ids[0] for scored in step.samples}) > 2


@pytest.mark.parametrize("mode", ["one_step_off", "fully_async"])
def test_each_answer_is_of_the_one_version_that_it_records(mode):
    """A large learning rate: tokens of two versions would differ from the trainer's."""
    with open_run(rollout_mode=mode, lr=1e-2, rollout_max_response_len=32) as run:
        steps = [run.step() for _ in range(3)]
    for step in steps:
        for scored in step.samples:
            assert scored.sample.policy_version in range(step.number)
            assert not scored.sample.version_spans, "one version"
    assert steps[0].metrics["train/rollout_logprob_abs_diff"] < 1e-5


def test_an_interrupted_step_is_returned_by_the_next_call_and_ends_before_the_run(monkeypatch):
    run = open_run()
    wait = type(run)._wait
    monkeypatch.setattr(
        type(run), "_wait", lambda self, future: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        run.step()
    monkeypatch.setattr(type(run), "_wait", wait)
    assert run.step().number == 1
    assert run.evaluate()["eval/heldout/reward_mean"] >= 0
    run.close()
    with pytest.raises(ConfigError, match="the run is closed"):
        run.step()
    with pytest.raises(ConfigError, match="the run is closed"):
        run.evaluate()
