"""Sandboxes for the commands of an agent, and verifiers that the agent cannot reach."""
