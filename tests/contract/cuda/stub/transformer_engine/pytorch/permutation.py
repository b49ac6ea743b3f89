"""Sorting tokens by expert."""

from transformer_engine.pytorch.kernels import absent

moe_permute = absent("moe_permute")
moe_permute_with_probs = absent("moe_permute_with_probs")
moe_sort_chunks_by_index = absent("moe_sort_chunks_by_index")
moe_sort_chunks_by_index_with_probs = absent("moe_sort_chunks_by_index_with_probs")
moe_unpermute = absent("moe_unpermute")
