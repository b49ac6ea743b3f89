"""The one exception that the agents' Ray process knows."""


class RpcError(Exception):
    """The head did not answer."""
