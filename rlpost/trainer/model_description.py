"""Read the architecture of a checkpoint, and check that the trainer supports it.

Standard library only.

Input: a Hugging Face folder. Output: a ModelDescription. ``rlpost.models.families`` has the
differences between families.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rlpost.config import model_arguments
from rlpost.config.checks.images import image_model_problems
from rlpost.config.groups.checkpoint import CheckpointConfig
from rlpost.config.model_file import model_path, read_model
from rlpost.config.plan import architecture
from rlpost.config.tree import Config
from rlpost.errors import ConfigError, WeightError
from rlpost.models import families
from rlpost.models.config_file import (
    language_model,
    parse_object,
    tied_problem,
    value_problem,
    with_language_model,
)
from rlpost.models.family import Family
from rlpost.models.model_types import HfConfig, MegatronFields
from rlpost.models.names import Dimensions
from rlpost.models.rope import RopeOptions, local_rope, missing_options, refused_options, rope
from rlpost.trainer.attention_backends import Attention, attention_of
from rlpost.trainer.weights.safetensors_files import tensor_files


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The architecture of one checkpoint."""

    path: Path
    architecture: str
    hf_config: HfConfig
    """Keys of the language model."""
    file_config: HfConfig = field(default_factory=dict)
    """config.json for an export: the file's content, with the values that are overridden."""
    tensors: Collection[str] = ()
    """Names in the folder's weights; empty without weights."""

    @property
    def family(self) -> Family:
        return families.family(self.architecture).stored_in(self.tensors)

    @property
    def fields(self) -> MegatronFields:
        """The family's fields of Megatron's TransformerConfig."""
        return self.family.fields(self.family.resolved(self.hf_config))

    @property
    def head_dim(self) -> int:
        return architecture.head_dim(self.hf_config)

    @property
    def dims(self) -> Dimensions:
        hf, fields = self.hf_config, self.fields
        return Dimensions(
            hf["num_key_value_heads"],
            self.head_dim,
            hf["vocab_size"],
            fields.get("num_moe_experts", 0),
            linear_key_heads=fields.get("linear_num_key_heads", 0),
            linear_key_dim=fields.get("linear_key_head_dim", 0),
            linear_value_heads=fields.get("linear_num_value_heads", 0),
            linear_value_dim=fields.get("linear_value_head_dim", 0),
        )

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return self.family.is_tied(self.hf_config)

    @property
    def rope(self) -> RopeOptions:
        """The options of the rotary embedding, in layers without a window where that matters."""
        return rope(self.hf_config)

    @property
    def local_rope(self) -> RopeOptions | None:
        """The options in layers with a window where they have others; None if there is none."""
        return local_rope(self.hf_config)

    def num_virtual_stages(self, config: Config) -> int | None:
        """Return the number of model chunks of each pipeline rank.

        None without interleaving, or for one chunk.
        """
        per_chunk = config.perf.num_layers_per_virtual_pipeline_stage
        if per_chunk is None:
            return None
        count = (
            self.hf_config["num_hidden_layers"]
            // config.perf.pipeline_model_parallel_size
            // per_chunk
        )
        return count if count > 1 else None

    def attention(self, config: Config, *, is_16_bit: bool) -> Attention:
        """Describe the attention of a rank."""
        return attention_of(
            self.hf_config,
            self.fields,
            head_dim=self.head_dim,
            tensor=config.perf.tensor_model_parallel_size,
            context=config.perf.context_parallel_size,
            is_16_bit=is_16_bit,
            is_deterministic=bool(config.megatron.options.get("deterministic_mode")),
            shares_rows=bool(config.perf.share_prefix),
        )

    def check_layout(self, config: Config, *, trains: bool = True) -> None:
        """Raise ConfigError if the model cannot be sharded this way.

        With ``trains``, also if it cannot be trained this way.
        """
        fields, hf = self.fields, self.hf_config
        if problems := image_model_problems(config, hf):
            raise ConfigError("\n".join(problems))
        if config.grpo.enable_mtp_training and (
            problem := architecture.mtp_problem(self.family, hf)
        ):
            raise ConfigError(problem)
        perf = config.perf
        tensor, expert = perf.tensor_model_parallel_size, perf.expert_model_parallel_size
        expert_tensor = perf.expert_tensor_parallel_size or tensor
        has_experts = "num_moe_experts" in fields
        if not has_experts and expert > 1:
            raise ConfigError(
                f"--expert-model-parallel-size {expert}: {self.path} has no experts; use 1"
            )
        heads = {key: hf[key] for key in TENSOR_PARALLEL_KEYS if key in hf}
        latent = {key: fields[key] for key in LATENT_KEYS if fields.get(key)}
        self._check_divisor("--tensor-model-parallel-size", tensor, heads)
        if has_experts:
            count = {"number of experts": fields["num_moe_experts"]}
            self._check_divisor("--expert-model-parallel-size", expert, count)
            width = {"moe_intermediate_size": fields["moe_ffn_hidden_size"]}
            self._check_divisor("--expert-tensor-parallel-size", expert_tensor, width)
        self._check_divisor("--tensor-model-parallel-size", tensor, latent)
        first = perf.decoder_first_pipeline_num_layers
        last = perf.decoder_last_pipeline_num_layers
        if first is None and last is None:
            per_stage = perf.num_layers_per_virtual_pipeline_stage or 1
            layers = {"num_hidden_layers": hf["num_hidden_layers"]}
            stages = perf.pipeline_model_parallel_size * per_stage
            self._check_divisor("--pipeline-model-parallel-size", stages, layers)
        if problem := architecture.sharding_problem(
            fields,
            tensor=tensor,
            expert=expert,
            expert_tensor=expert_tensor,
            context=perf.context_parallel_size,
        ):
            raise ConfigError(problem)
        # Megatron's MoELayer refuses to train without sequence parallelism.
        needs_sequence_parallel = has_experts and tensor > 1 and (trains or expert > 1)
        if needs_sequence_parallel and not perf.sequence_parallel:
            raise ConfigError(
                "experts with tensor parallelism need --sequence-parallel true; set it"
            )

    def _check_divisor(self, flag: str, divisor: int, sizes: Mapping[str, int]) -> None:
        for key, size in sizes.items():
            if size % divisor:
                raise ConfigError(
                    f"{flag} {divisor} does not divide {key} = {size} of {self.path}; use a divisor"
                )

    def num_valid_columns(self, *, tp_rank: int, tp_size: int) -> int:
        """Return how many columns of a rank's logits are tokens.

        The others are padding of the vocabulary.
        """
        vocab_size = self.hf_config["vocab_size"]
        per_rank = -(-vocab_size // tp_size)
        return min(max(vocab_size - tp_rank * per_rank, 0), per_rank)


LATENT_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_pos_emb_head_dim")
"""Fields of latent attention that are sharded by tensor parallelism."""
TENSOR_PARALLEL_KEYS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
NEEDED = (
    "hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps", "rope_theta", "max_position_embeddings"
)  # fmt: skip
"""Other required keys of config.json."""


def description_of(config: Config) -> ModelDescription:
    """Describe a run's model: by its folder or, before it is here, by its published config.json.

    Raises:
        ConfigError: there is neither.
        WeightError, ConfigError: as ``read_description``.
    """
    path = model_path(config.checkpoint)
    read_model(path)  # names a file that cannot be read
    return _described(path, config.checkpoint)


def read_description(
    hf_checkpoint: str | Path, settings: CheckpointConfig | None = None
) -> ModelDescription:
    """Read config.json of a Hugging Face folder and apply the overrides of ``settings``.

    Raises:
        WeightError: config.json is missing or lacks a key, the architecture is unknown, or the
            model has a feature that is not supported. It would compute other results than its
            checkpoint.
        ConfigError: MODEL_ARGS in ``settings`` contradict config.json; one line per value.
    """
    path = Path(hf_checkpoint) / "config.json"
    if not path.is_file():
        raise WeightError(
            f"--hf-checkpoint {hf_checkpoint} has no config.json; use a Hugging Face folder"
        )
    return _described(path, settings or CheckpointConfig())


def _described(path: Path, settings: CheckpointConfig) -> ModelDescription:
    overrides = settings.override_hf_config
    try:
        content = parse_object(path.read_text())
        hf = language_model(content)
        if problem := value_problem(hf):
            raise WeightError(problem)
        known = (hf.get("architectures") or ["none given"])[0]
        hf = families.family(known).resolved(hf)
        description = ModelDescription(
            path,
            known,
            architecture.overridden(overrides, hf),
            with_language_model(content, partial(architecture.overridden, overrides)),
            _tensors(path.parent),
        )
        if problem := tied_problem(content):
            raise WeightError(problem)
        refused = {key: hf.get(key) for key in description.family.refused}
        if problem := architecture.routing_problem(description.fields):
            raise WeightError(problem)
        filled = {key for key, value in description.hf_config.items() if value is not None}
        present = filled | description.rope.keys()
        if "moe_intermediate_size" in present:
            present.add("intermediate_size")  # a model whose layers are all sparse has no such key
        missing = [key for key in (*NEEDED, *TENSOR_PARALLEL_KEYS) if key not in present]
        if missing := missing + missing_options(description.hf_config):
            raise WeightError(f"has no {', '.join(missing)}; add what the model's page says")
        if problem := architecture.rotary_problem(description.hf_config):
            raise WeightError(problem)
        if problem := architecture.layers_problem(description.hf_config, description.fields):
            raise WeightError(problem)
        stated = architecture.architecture(description.family, description.hf_config)
        problems = model_arguments.problems(settings.model_args, stated)
        problems += model_arguments.idle_overrides(overrides, stated)
    except KeyError as error:
        raise WeightError(
            f"{path}: has no {error}, which {known} needs; add what the model's page says"
        ) from None
    except WeightError as error:
        raise WeightError(f"{path}: {error}") from None
    except ValueError as error:
        raise WeightError(f"{path}: {error}; fetch it again") from None
    for key, value in (refused | _refused_of_all(description)).items():
        if value:
            raise WeightError(
                f"{path}: {key}={value!r} is not supported; use a checkpoint without it"
            )
    if problems:
        raise ConfigError("\n".join(problems))
    return description


def _tensors(folder: Path) -> Collection[str]:
    """The names of a folder's tensors; empty if it has no weights, or broken ones."""
    try:
        return tensor_files(folder).keys()
    except WeightError:  # ``file_problems`` reports it
        return ()


def _refused_of_all(description: ModelDescription) -> dict[str, object]:
    """Return the features of a checkpoint that no family supports.

    These are other activations, dropout, and other rotary embeddings.
    """
    hf, fields = description.hf_config, description.fields
    latent = fields["rope_type"] if fields.get("multi_latent_attention") else None
    return refused_options(hf, latent=latent) | {
        "hidden_act": hf["hidden_act"] if hf.get("hidden_act", "silu") != "silu" else None,
        "attention_dropout": hf.get("attention_dropout"),
    }
