"""The fused rotary embedding."""

from transformer_engine.pytorch.kernels import absent

apply_rotary_pos_emb = absent("apply_rotary_pos_emb")
apply_fused_qkv_rotary_pos_emb = absent("apply_fused_qkv_rotary_pos_emb")
