"""Conversion of weights between Hugging Face folders, torch_dist and FP8 blocks."""
