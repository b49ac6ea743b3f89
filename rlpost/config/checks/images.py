"""Check images of prompts, and models that are published with an encoder of images. Pure.

Input: a ``Config``, the keys of the language model in config.json. Output: one line for each
problem.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlpost.config.engine_args import FEATURE_CACHE, IMAGE_ARGS
from rlpost.config.eval_sets import EvalSet, eval_sets
from rlpost.config.plan.shape import layers_of, layout_of
from rlpost.config.tree import Config
from rlpost.config.wording import spelled
from rlpost.errors import ConfigError
from rlpost.models.families import FAMILIES, family_of
from rlpost.models.family import Family
from rlpost.models.model_types import HfConfig

KEYS = "--multimodal-keys"
KIND = "image"
OWN_DRAFTS = ("EAGLE", "NEXTN")
"""Values of --sglang-speculative-algorithm whose drafts a layer of the model may write."""
DRAFT_WITH_IMAGES = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
"""Models whose draft layer gets the features of images in SGLang 0.5.21 (``mm_input_embeds`` in
``qwen3_5_mtp.py`` and ``eagle_worker_v2.py``). Drafts decide the speed alone: the model verifies them.
"""


def image_setting_problems(config: Config) -> list[str]:
    """Return the settings that prompts with images do not allow."""
    rollout = config.rollout
    trains_encoder = config.optimizer.vision_tower != "frozen"  # also without images
    if not config.takes_images:
        without = {
            "image_max_pixels": rollout.image_max_pixels is not None,
            "vision_tower": trains_encoder,
        }
        return [
            f"{spelled(config, name)} has no effect without images; add {KEYS} "
            '\'{"image": "images"}\', or leave it out'
            for name, is_given in without.items()
            if is_given
        ]
    keys = rollout.multimodal_keys
    problems = [
        f'{KEYS} {name}: prompts have images alone; give {{"{KIND}": KEY}}'
        for name in keys
        if name != KIND
    ]
    if KIND in keys and not (isinstance(keys[KIND], str) and keys[KIND]):
        problems.append(f"{KEYS} {KIND}: {keys[KIND]!r} is no key; give the name of one")
    if not rollout.apply_chat_template:
        problems.append(
            f"{KEYS}: the chat template writes the tokens of images; add --apply-chat-template"
        )
    if trains_encoder and config.lora.lora_rank is not None:
        problems.append(
            f"{spelled(config, 'vision_tower')} with {spelled(config, 'lora_rank')}, which trains adapters of "
            "the language model alone; leave one of them out"
        )
    if trains_encoder and config.use_critic:
        problems.append(
            f"{spelled(config, 'vision_tower')} with --advantage-estimator {config.grpo.advantage_estimator}, whose "
            "critic reads the features of the policy's frozen encoder; leave one of them out"
        )
    if trains_encoder and config.sglang.rollout_external_engine_addrs:
        problems.append(
            f"{spelled(config, 'vision_tower')} with --rollout-external-engine-addrs: a server started without "
            f"{FEATURE_CACHE}=0 keeps features of images across weight updates, and does not report it; "
            "leave one of them out"
        )
    return [*problems, *_not_with_images(config), *_engine_problems(config)]


def _not_with_images(config: Config) -> Iterator[str]:
    """Yield what would not see the images, or would lose them."""
    rollout, grpo = config.rollout, config.grpo
    rules = [
        (
            rollout.custom_generate_function_path is not None,
            "--custom-generate-function-path, which gets tokens alone",
        ),
        (rollout.rm_type == "judge", "--rm-type judge, which reads text alone"),
        (grpo.is_supervised, spelled(config, "loss_type") + ", which trains text alone"),
        (config.distillation.use_opd, "--use-opd, whose teacher reads text alone"),
        (grpo.enable_mtp_training, "--enable-mtp-training, whose layer embeds tokens alone"),
        (
            grpo.use_rollout_routing_replay,
            "--use-rollout-routing-replay, whose routes of images are not compared",
        ),
        (
            config.debug.load_debug_rollout_data is not None,
            "--load-debug-rollout-data, which records no images",
        ),
    ]
    for one in _sets(config):
        rules += [
            (one.rm_type == "judge", f"the judge of the evaluation set {one.name}"),
            (
                one.custom_generate_function_path is not None,
                f"the generate function of the evaluation set {one.name}",
            ),
        ]
    for is_so, what in rules:
        if is_so:
            yield f"{KEYS} with {what}: not supported; leave one of them out"


def _sets(config: Config) -> list[EvalSet]:
    try:
        return list(eval_sets(config.eval))
    except ConfigError:  # reported by another check
        return []


def _engine_problems(config: Config) -> Iterator[str]:
    """Yield settings of engines that would read other pixels than the trainer, or none."""
    args = config.sglang.server_args
    for name, value in IMAGE_ARGS.items():
        if args.get(name, value) != value:
            flag = f"--sglang-{name.replace('_', '-')}"
            yield f"{flag} {args[name]}: images need {value}; leave it out"
    refused = ["mm_process_config", "disable_fast_image_processor"]
    if not _drafts_itself(config):
        refused.append("speculative_algorithm")
    for name in refused:
        if args.get(name):
            flag = f"--sglang-{name.replace('_', '-')}"
            yield f"{flag} {args[name]}: not supported with {KEYS}; leave it out"
    if config.optimizer.vision_tower == "all":
        return  # updates send the whole encoder
    if args.get("load_format") == "dummy":
        yield (
            "--sglang-load-format dummy: no update sends the encoder of images, which would stay "
            "random; leave it out"
        )
    if config.offload_rollout and args.get("enable_weights_cpu_backup") is False:
        yield (
            "--sglang-enable-weights-cpu-backup false: engines that are offloaded would lose the "
            "encoder of images, which no update sends; leave it out"
        )


def _drafts_itself(config: Config) -> bool:
    """Whether the layer of a model for multi-token prediction writes the drafts."""
    args = config.sglang.server_args
    is_own = not args.get("speculative_draft_model_path")
    return is_own and args.get("speculative_algorithm") in OWN_DRAFTS


def image_model_problems(config: Config, hf: HfConfig) -> list[str]:
    """Return the settings that such a model does not allow; ``lora`` has those of adapters."""
    family, problems = family_of(hf), list[str]()
    architecture = (hf.get("architectures") or ["?"])[0]
    if config.takes_images and family is not None:
        problems += [f"{KEYS}: {line}" for line in _encoder_problems(config, hf, family)]
    if family is not None and family.carried and family.vision is None and config.use_critic:
        estimator = config.grpo.advantage_estimator
        problems.append(
            f"--advantage-estimator {estimator}: a critic has the policy's layers, and the trainer has no "
            f"encoder of images for {architecture}; use an estimator without a critic, or the "
            "language model saved alone"
        )
    return problems


def _encoder_problems(config: Config, hf: HfConfig, family: Family) -> Iterator[str]:
    """Yield why the trainer cannot run the model's encoder of images."""
    name = hf["architectures"][0]
    if family.vision is None:
        known = ", ".join(each for each, one in FAMILIES.items() if one.vision is not None)
        yield (
            f"the trainer has no encoder of images for {name}, only for {known}; leave the flag out to "
            "train on text"
        )
        return
    if missing := family.vision.problem(hf):
        yield f"{name}: {missing}; use the config.json of the model's page"
        return
    deep, layout = family.vision.num_deep_layers(hf), layout_of(config)
    first = layout.chunk or len(layers_of(layout, hf["num_hidden_layers"], 0))
    if first < deep:
        yield (
            f"{name} adds features of images after its first {deep} layers, and the first stage begins "
            f"with {first}; use fewer stages (--pipeline-model-parallel-size), or "
            f"--decoder-first-pipeline-num-layers {deep}"
        )
    if _drafts_itself(config) and name not in DRAFT_WITH_IMAGES:
        yield (
            f"--sglang-speculative-algorithm: engines have no drafts with images for {name}, only for "
            f"{', '.join(DRAFT_WITH_IMAGES)}; leave it out"
        )
    if config.megatron.options.get("apply_rope_fusion"):
        yield (
            "--apply-rope-fusion true: the kernel rotates by one position a token, and those of images "
            "have three; omit the option"
        )
