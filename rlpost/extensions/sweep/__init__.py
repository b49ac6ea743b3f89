"""A run for each point of a grid of settings."""
