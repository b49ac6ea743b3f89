"""Prompts with images: what would not see them is refused by name, and engines get what they need."""

from __future__ import annotations

import pytest

from rlpost.config.checks.images import image_model_problems, image_setting_problems
from rlpost.config.engine_args import engine_args
from rlpost.config.engine_groups import group_config
from rlpost.config.load import load

IMAGES = {"multimodal_keys": {"image": "images"}, "apply_chat_template": True}


def config(rollout=IMAGES, **groups):
    cluster = {"actor_num_nodes": 1, "actor_num_gpus_per_node": 8, "rollout_num_gpus": 1}
    given = {"cluster": cluster | groups.pop("cluster", {}), "rollout": rollout, **groups}
    return load([], given).config


def test_images_alone_are_accepted():
    assert image_setting_problems(config()) == []
    assert image_setting_problems(config(IMAGES | {"image_max_pixels": 1 << 20})) == []
    assert image_setting_problems(config({})) == []
    assert image_setting_problems(config(env={"env": ["pkg.mod:Game"]})) == []


BLIND = {
    "--custom-generate-function-path": {"rollout": IMAGES | {"custom_generate_function_path": "a.b"}},
    "--rm-type judge": {"rollout": IMAGES | {"rm_type": "judge"}},
    "--loss-type sft_loss": {"grpo": {"loss_type": "sft_loss"}},
    "--use-opd": {"distillation": {"use_opd": True, "opd_type": "sglang"}},
    "--enable-mtp-training": {"grpo": {"enable_mtp_training": True}},
    "--use-rollout-routing-replay": {"grpo": {"use_rollout_routing_replay": True}},
    "--load-debug-rollout-data": {"debug": {"load_debug_rollout_data": "a-{rollout_id}"}},
    "--apply-chat-template": {"rollout": {"multimodal_keys": {"image": "images"}}},
    "--multimodal-keys video": {
        "rollout": IMAGES | {"multimodal_keys": {"image": "images", "video": "videos"}}
    },
    "--multimodal-keys image: 7": {"rollout": IMAGES | {"multimodal_keys": {"image": 7}}},
    "--image-max-pixels": {"rollout": {"image_max_pixels": 1 << 20}},
    "--vision-tower all has no effect": {"rollout": {}, "optimizer": {"vision_tower": "all"}},
    "--vision-tower merger with --lora-rank 8": {
        "optimizer": {"vision_tower": "merger"},
        "lora": {"lora_rank": 8},
    },
    "--vision-tower merger with --advantage-estimator ppo": {
        "optimizer": {"vision_tower": "merger"},
        "grpo": {"advantage_estimator": "ppo"},
    },
    "--vision-tower merger with --rollout-external-engine-addrs": {
        "optimizer": {"vision_tower": "merger"},
        "sglang": {"rollout_external_engine_addrs": ["node:1"]},
    },
    "--sglang-enable-multimodal": {"sglang": {"sglang_enable_multimodal": False}},
    "--sglang-image-processor-backend": {"sglang": {"sglang_image_processor_backend": "auto"}},
    "--sglang-mm-process-config": {"sglang": {"sglang_mm_process_config": {"image": {}, "a": 1}}},
    "--sglang-speculative-algorithm": {"sglang": {"sglang_speculative_algorithm": "NGRAM"}},
    "--sglang-speculative-algorithm EAGLE": {
        "sglang": {"sglang_speculative_algorithm": "EAGLE", "sglang_speculative_draft_model_path": "/d"}
    },
    "--sglang-load-format dummy": {"sglang": {"sglang_load_format": "dummy"}},
    "--sglang-enable-weights-cpu-backup": {
        "cluster": {"colocate": True, "rollout_num_gpus": 8},
        "sglang": {"sglang_enable_weights_cpu_backup": False},
    },
    "evaluation set held": {
        "eval": {"eval_config": "held.yaml", "eval_interval": 1},
    },
}  # fmt: skip


@pytest.mark.parametrize("flag", BLIND)
def test_what_would_not_see_an_image_is_refused_by_name(flag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held.yaml").write_text(
        "eval:\n  datasets:\n    - name: held\n      path: a.jsonl\n      rm_type: judge\n"
    )
    problems = image_setting_problems(config(**BLIND[flag]))
    assert len(problems) == 1 and flag in problems[0], problems


def test_updates_send_an_encoder_that_is_trained_as_a_whole():
    for part, count in (("frozen", 1), ("merger", 1), ("all", 0)):
        random = {"sglang": {"sglang_load_format": "dummy"}, "optimizer": {"vision_tower": part}}
        assert len(image_setting_problems(config(**random))) == count


def test_engines_process_images_as_the_trainer_and_keep_the_encoder():
    assert not {"enable_multimodal", "image_processor_backend"} & engine_args(config({})).keys()
    args = engine_args(config())
    assert args["enable_multimodal"] is True and args["image_processor_backend"] == "pil"
    assert "enable_weights_cpu_backup" not in args
    shared = config(cluster={"colocate": True, "rollout_num_gpus": 8})
    assert shared.offload_rollout and engine_args(shared)["enable_weights_cpu_backup"] is True


def test_engines_that_follow_the_policy_read_images_and_a_judge_reads_text():
    groups = {"judge": {"model": "/j"}, "held": {"follows_policy": True}}
    run = config(engines=groups, eval={"eval_engines": "held"})
    assert engine_args(group_config(run, "held"))["enable_multimodal"] is True
    assert "enable_multimodal" not in engine_args(group_config(run, "judge"))


def test_a_model_without_an_encoder_of_images_is_refused():
    hf = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (problem,) = image_model_problems(config(), hf)
    assert "the trainer has no encoder of images for Qwen3ForCausalLM" in problem
    assert image_model_problems(config({}), hf) == []
