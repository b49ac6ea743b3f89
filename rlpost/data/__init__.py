"""Prompt sets, tokenizer, cursor."""
