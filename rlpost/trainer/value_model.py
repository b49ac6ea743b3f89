"""The critic's model: a GPTModel of the policy's family whose output layer is a value head.

Input: the description of the policy's checkpoint, the layout, initial weights with or without a
value head. Output: this rank's chunks, their inventory and their weights.

Every row of the output is the value of the state in which the next token is chosen. In a Hugging
Face folder the head is ``score.weight`` [1, hidden] and ``score.bias`` [1], as in transformers'
classes for token classification with one label; a torch_dist checkpoint calls it ``value_head``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from rlpost.config.tree import Config
from rlpost.durable.torch_dist_folder import find_checkpoint
from rlpost.errors import CheckpointError, WeightError
from rlpost.models.family import Family
from rlpost.models.names import Rule
from rlpost.trainer import device, megatron_checkpoint, parallel
from rlpost.trainer.model import build_model
from rlpost.trainer.model_description import ModelDescription
from rlpost.trainer.outcomes import on_every_rank, same_on_every_rank
from rlpost.trainer.torch_dist.reader import StoredTensors
from rlpost.trainer.weights.importer import HuggingFaceFolder, import_weights
from rlpost.trainer.weights.inventory import OUTPUT_LAYER, Gather, Inventory, gather_entries

logger = logging.getLogger(__name__)

HEAD_STD = 0.02
"""Standard deviation of a new head, Megatron's default of initial weights."""
HEAD_WEIGHT, HEAD_BIAS = "score.weight", "score.bias"
OUTPUT_BIAS = "output_layer.bias"
STORED_HEAD = "value_head."
"""Prefix of the head's keys in a torch_dist checkpoint: not that of the policy's output layer."""
LM_HEAD = "lm_head.weight"


class ValueHead(torch.nn.Module):
    """A linear layer from the hidden state to one float32 number.

    It is the same on all tensor-parallel ranks.

    With sequence parallelism each rank computes the values of its rows, and Megatron sums the
    gradients of the head over the ranks (``sequence_parallel`` of a parameter).
    """

    def __init__(self, config: TransformerConfig, *, seed: int) -> None:
        """Draw the weight from a separate generator: equal at every layout."""
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        generator = torch.Generator().manual_seed(seed)
        weight = HEAD_STD * torch.randn(1, config.hidden_size, generator=generator)
        self.weight = torch.nn.Parameter(weight.to(device.current(), config.params_dtype))
        self.bias = torch.nn.Parameter(
            torch.zeros(1, dtype=config.params_dtype, device=device.current())
        )
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self,
        hidden_TBH: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Compute the values: [T, 1, hidden] -> [T, 1, 1] float32.

        The arguments are those of Megatron's output layer.
        """
        del weight, runtime_gather_output
        values = F.linear(hidden_TBH.float(), self.weight.float(), self.bias.float())
        if self.sequence_parallel:
            # Every rank computes the whole loss, so the gradient is split and not summed.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: Mapping[str, object] | None = None,
    ) -> ShardedStateDict:
        """Both parameters in Megatron's sharded form, under the keys of ``STORED_HEAD``."""
        del metadata
        made = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {}, sharded_offsets
        )
        for name, part in made.items():
            part.key = STORED_HEAD + name.removeprefix(prefix)
        return made


def value_family(family: Family) -> Family:
    """Return the family with a value head in place of the output layer."""
    others = tuple(rule for rule in family.rules if rule.megatron != OUTPUT_LAYER)
    head = (Rule(OUTPUT_LAYER, (HEAD_WEIGHT,)), Rule(OUTPUT_BIAS, (HEAD_BIAS,)))
    return replace(family, rules=(*others, *head))


def build_value_model(description: ModelDescription, config: Config) -> list[GPTModel]:
    """Build this rank's chunks; see ``rlpost.trainer.model.build_model``. The head is initialised.

    Raises:
        ConfigError: as ``build_model``.
    """
    untied = replace(description, hf_config={**description.hf_config, "tie_word_embeddings": False})
    chunks = build_model(untied, config)
    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer = ValueHead(chunk.config, seed=config.optimizer.seed)
    return chunks


def value_inventory(
    chunks: Sequence[GPTModel],
    description: ModelDescription,
    *,
    gather: Gather = gather_entries,
) -> Inventory:
    """All weights of the critic, as ``rlpost.trainer.model.inventory_of`` lists the policy's."""
    return Inventory(
        chunks,
        family=value_family(description.family),
        dims=description.dims,
        groups=parallel.weight_groups(),
        tied=False,
        gather=gather,
    )


def value_config(description: ModelDescription) -> dict[str, object]:
    """Return the config.json of an exported critic.

    Its class is transformers' for token classification, with one label. Of models with images
    transformers has none: their own class opens the folder without the head.
    """
    ending = r"For(CausalLM|ConditionalGeneration)$"
    name = re.sub(ending, "ForTokenClassification", description.architecture)
    whole = description.file_config if description.family.carried else description.hf_config
    return {
        **whole,
        "architectures": [name],
        "id2label": {"0": "value"},
        "label2id": {"value": 0},
    }


class ValueFolder(HuggingFaceFolder):
    """A Hugging Face folder as a source of a critic: with its value head, or with a new one."""

    def __init__(self, folder: str | Path, *, seed: int, hidden: int) -> None:
        """Read the file of each tensor. Raises WeightError as ``HuggingFaceFolder``."""
        super().__init__(folder)
        self.file_of.pop(LM_HEAD, None)
        self.has_head = HEAD_WEIGHT in self.file_of
        generator = torch.Generator().manual_seed(seed)
        self._new = {
            HEAD_WEIGHT: HEAD_STD * torch.randn(1, hidden, generator=generator),
            HEAD_BIAS: torch.zeros(1),
        }

    def read(self, name: str, *, expert: int | None = None) -> torch.Tensor:
        """One full tensor; a part of the head that the folder lacks is new."""
        if name in self._new.keys() - self.file_of:
            return self._new[name]
        return super().read(name, expert=expert)


def read_value_weights(
    folder: str | Path,
    chunks: Sequence[GPTModel],
    inventory: Inventory,
    *,
    seed: int,
) -> None:
    """Fill the critic from weights of a policy or of a critic: torch_dist, or Hugging Face.

    Raises:
        WeightError, CheckpointError: the weights do not fit the model.
    """
    checkpoint = same_on_every_rank(lambda: find_checkpoint(folder), CheckpointError)
    if checkpoint is None:
        hidden = chunks[0].config.hidden_size

        def read() -> bool:
            source = ValueFolder(folder, seed=seed, hidden=hidden)
            import_weights(inventory, source)
            return source.has_head

        has_head = on_every_rank(read, WeightError)
    else:
        has_head = same_on_every_rank(
            lambda: f"{STORED_HEAD}weight" in StoredTensors(checkpoint), CheckpointError
        )
        omitted = () if has_head else (STORED_HEAD,)
        megatron_checkpoint.load_weights(checkpoint, chunks=chunks, omitted=omitted)
    if not has_head:
        logger.info("%s has no value head: the critic's is random", folder)
