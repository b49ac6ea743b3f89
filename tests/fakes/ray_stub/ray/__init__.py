"""Stub of Ray for tests of the agents; first on PYTHONPATH, it shadows the real package."""
