"""The exception that ``bootstrap.agent.ray_process`` catches."""


class RpcError(Exception):
    """The head did not answer."""
