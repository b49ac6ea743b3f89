"""Reward functions: pure, one a name."""
