"""A folder for PYTHONPATH, in which a stub is found as ``ray``."""
