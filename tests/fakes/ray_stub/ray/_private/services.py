"""Stub of ``ray._private.services``."""


def get_node(*names: str) -> None:
    """Ray's entry of a node, which the stub does not have."""
