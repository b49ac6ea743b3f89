"""Worked examples of custom functions."""
