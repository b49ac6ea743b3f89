"""Stub of ``ray._private``."""
