"""Compatibility with custom functions that were written for another trainer."""
