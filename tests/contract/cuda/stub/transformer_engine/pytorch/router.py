"""The fused router."""

from transformer_engine.pytorch.kernels import absent

fused_compute_score_for_moe_aux_loss = absent("fused_compute_score_for_moe_aux_loss")
fused_moe_aux_loss = absent("fused_moe_aux_loss")
fused_topk_with_score_function = absent("fused_topk_with_score_function")
