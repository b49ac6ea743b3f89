"""Reward functions by name, one module each."""
