"""Stands in for Ray where a test is about the agents: first on PYTHONPATH it shadows the real
one.
"""
