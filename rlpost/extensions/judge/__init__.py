"""Rewards from a language model that judges answers."""
