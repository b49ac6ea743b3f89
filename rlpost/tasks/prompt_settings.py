"""Derive the arguments of the prompt reader from the settings; check the prompt files.

Input: the table [rollout] of a run, or as an evaluation set overrides it. Output: the keys of a row
and the maximum prompt length, or an error for the first invalid file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rlpost.config.groups.rollout import RolloutConfig
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.images.processor import ImageProcessor
from rlpost.images.tokens import ImageMarks, ImageTokens, check_encoder, check_padding
from rlpost.tasks.examples import ExampleTokenizer
from rlpost.tasks.fingerprint import image_states
from rlpost.tasks.passed_checks import PassedCheck
from rlpost.tasks.prompt_images import PromptImages, digest_of
from rlpost.tasks.prompts import PromptFields, PromptSet, check_prompt_file
from rlpost.tasks.rows import split_source
from rlpost.tasks.tokenizer import PromptTokenizer
from rlpost.tasks.vocabulary import vocabulary_size

IMAGE_KIND = "image"
"""The key of --multimodal-keys that is supported."""


def prompt_fields(
    rollout: RolloutConfig,
    *,
    trains_label: bool = False,
    has_environment: bool = False,
    flag_prefix: str = "--",
) -> PromptFields:
    """Return the keys of prompt, label, metadata and tools, and what the label is for."""
    others = (rollout.custom_rm_path, rollout.custom_generate_function_path)
    grades_by_name = not trains_label and not has_environment and others == (None, None)
    return PromptFields(
        rollout.input_key,
        rollout.label_key,
        rollout.metadata_key,
        rollout.tool_key,
        image_key=rollout.multimodal_keys.get(IMAGE_KIND),
        rm_type=rollout.rm_type if grades_by_name else None,
        trains_label=trains_label,
        flag_prefix=flag_prefix,
    )


def image_processor(config: Config) -> ImageProcessor | None:
    """Return the processor of the model's images; None without --multimodal-keys.

    Raises:
        ConfigError: the model has none that is known or that fits its config.json, or
            --image-max-pixels does not fit it.
    """
    if not config.takes_images:
        return None
    folder, most = config.checkpoint.hf_checkpoint, config.rollout.image_max_pixels
    processor = ImageProcessor.of(folder, max_pixels=most)
    check_encoder(folder, processor)
    return processor


def longest_prompt(rollout: RolloutConfig) -> int | None:
    """Return the maximum prompt length, which leaves a token for an answer; None if unlimited."""
    context = rollout.rollout_max_context_len
    bounds = (rollout.rollout_max_prompt_len, None if context is None else context - 1)
    return min((bound for bound in bounds if bound is not None), default=None)


def prompt_set(
    sources: Sequence[str],
    config: Config,
    rollout: RolloutConfig,
    tokenizer: PromptTokenizer,
    *,
    skip_bad: bool | None = None,
    keep: Callable[[bytes], str] = digest_of,
) -> PromptSet:
    """Return the prompts of files as a run reads them, with the keys of ``rollout``.

    ``keep`` stores an image and returns its digest. Raises ConfigError as ``image_processor`` and
    ``check_padding``.

    Rows of an ``ExampleTokenizer`` are trained; --rollout-max-context-len then bounds prompt and
    response together. ``skip_bad``: default by --bad-prompts. Raises DataError for an unreadable
    file.
    """
    whole = tokenizer.whole if isinstance(tokenizer, ExampleTokenizer) else None
    is_trained = whole is not None
    processor, images = image_processor(config), None
    if processor is not None:
        check_padding(config.checkpoint.hf_checkpoint, tokenizer.pad_token)
        tokens = ImageTokens.of(config.checkpoint.hf_checkpoint)
        marks = ImageMarks.of(tokens, tokenizer.decode_with_special)
        images = PromptImages(processor, tokens, marks, keep)
    return PromptSet(
        sources,
        tokenize=tokenizer,
        fields=prompt_fields(
            rollout, trains_label=is_trained, has_environment=config.answers_are_episodes
        ),
        max_prompt_len=rollout.rollout_max_prompt_len if is_trained else longest_prompt(rollout),
        skip_bad=rollout.bad_prompts == "skip" if skip_bad is None else skip_bad,
        vocab_size=vocabulary_size(config.checkpoint.hf_checkpoint),
        whole=whole,
        max_len=rollout.rollout_max_context_len if is_trained else None,
        images=images,
    )


def check_prompts(
    sources: Sequence[str],
    rollout: RolloutConfig,
    *,
    trains_label: bool = False,
    has_environment: bool = False,
    flag_prefix: str = "--",
    processor: ImageProcessor | None = None,
) -> None:
    """Read the files as a run would, up to the tokenizer; not those that passed before.

    ``flag_prefix``: see PromptFields; ``processor``: see ``image_processor``.

    Raises:
        ConfigError: the number of --prompt-data-weights differs from the number of files.
        DataError: a file cannot be read, or a row is bad and bad rows are not skipped.
    """
    weights = rollout.prompt_data_weights
    if weights and tuple(sources) == rollout.prompt_data and len(weights) != len(sources):
        flag_value = " ".join(f"{weight:g}" for weight in weights)
        raise ConfigError(
            f"--prompt-data-weights {flag_value}: {len(weights)} weights for {len(rollout.prompt_data)} --prompt-data; "
            "give one for each file, in the same order, or none"
        )
    fields = prompt_fields(
        rollout,
        trains_label=trains_label,
        has_environment=has_environment,
        flag_prefix=flag_prefix,
    )
    applies = rollout.apply_chat_template
    skips = rollout.bad_prompts == "skip"
    # Beside others a file may have text alone, and environments return images themselves.
    needs = flag_prefix == "--" and len(sources) == 1 and not has_environment
    for source in sources:
        path, _ = split_source(source)
        images = None if fields.image_key is None else image_states(path, fields)
        arguments = f"{source} {fields} {applies} {processor} {needs} {images}"
        passed = PassedCheck("prompts", arguments, partial(list, [path]))
        if passed.exists:
            continue
        check_prompt_file(
            source,
            fields,
            apply_chat_template=applies,
            skip_bad=skips,
            processor=processor,
            needs_images=needs,
        )
        if not skips:  # skipped rows are reported each time
            passed.record()
