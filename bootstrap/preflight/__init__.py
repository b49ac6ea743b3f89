"""Checks of each node before Ray starts, and the table of all nodes."""
