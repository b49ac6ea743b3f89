"""Environments: the protocol, adapters, and how episodes become samples."""
