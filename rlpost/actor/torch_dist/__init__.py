"""Checkpoints in Megatron's format torch_dist: what each rank writes, how it is streamed, how it is read back."""
