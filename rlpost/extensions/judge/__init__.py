"""Rewards from a language model."""
