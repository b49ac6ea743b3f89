"""Hugging Face weights into Megatron, back again, and on to the engines."""
