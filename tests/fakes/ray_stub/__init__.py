"""Folder for PYTHONPATH that contains the stub ``ray``."""
