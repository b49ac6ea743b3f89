"""Worked examples of functions of the user's own."""
