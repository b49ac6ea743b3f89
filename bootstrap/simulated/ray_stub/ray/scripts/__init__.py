"""Stub of ``ray.scripts``."""
