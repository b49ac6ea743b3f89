"""Print the arguments with which rows that sequences share reach TransformerEngine's attention.

Usage: ``python -m tests.contract.cuda.shared_rows FOLDER``, with ``stub/`` in PYTHONPATH and a
family's folder. Each row of keys, queries and values contains its token.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any
from unittest import mock

import torch

from tests.contract.cuda import fakes  # isort: skip  (before the first import of Megatron-core)

from megatron.core.transformer.enums import AttnMaskType
from transformer_engine.pytorch import DotProductAttention

from rlpost.trainer import parallel
from rlpost.trainer.model import build_model
from rlpost.trainer.model_description import read_description
from rlpost.trainer.packing import RowLayout, pack
from rlpost.trainer.parallel import Rendezvous
from rlpost.trainer.shared_rows import row_params
from tests.contract.test_shared_prefix import random_group
from tests.settings import rank_config


def main(folder: str) -> None:
    """Call core attention of the first layer with a micro-batch; print samples and arguments."""
    samples = tuple(random_group(random.Random(2), [*range(9)]))
    packed = pack(samples, RowLayout(row_multiple=16, share_prefix=True))
    rows = packed.input_ids[0]
    seen: dict[str, Any] = {}

    def record(
        _: Any, query: Any, key: Any, value: Any, mask: None, **options: Any
    ) -> torch.Tensor:
        tokens = {"query": query, "key": key, "value": value}
        assert mask is None
        seen.update({name: tensor[:, 0, 0].tolist() for name, tensor in tokens.items()})
        seen.update(
            {
                name: each.tolist() if isinstance(each, torch.Tensor) else each
                for name, each in options.items()
            }
        )
        seen["dtypes"] = [str(options[name].dtype) for name in ("cu_seqlens_q", "cu_seqlens_kv")]
        return query

    settings = rank_config(folder, bf16=True, share_prefix=True)
    with (
        fakes.faked_cuda(),
        fakes.faked_world(0, 1),
        mock.patch.object(DotProductAttention, "forward", record),
    ):
        parallel.initialise(Rendezvous(0, 1, "127.0.0.1", 1), settings, num_virtual_stages=None)
        (chunk,) = build_model(read_description(folder, None), settings)
        core = chunk.decoder.layers[0].self_attention.core_attention
        tokens = rows[:, None, None].to(torch.bfloat16)
        core(
            tokens.expand(-1, core.heads, 8),
            tokens.expand(-1, 1, 8),
            tokens.expand(-1, 1, 8),
            None,
            attn_mask_type=AttnMaskType.causal,
            attention_bias=None,
            packed_seq_params=row_params(packed),
        )
    found = {"samples": [list(sample.token_ids) for sample in samples], "arguments": seen}
    print("OBSERVED " + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
