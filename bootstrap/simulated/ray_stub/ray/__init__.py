"""Stands in for Ray where only the agents run: first on PYTHONPATH it shadows the real one."""
