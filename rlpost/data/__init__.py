"""Prompt files, tokenizer and prompt cursor."""
