"""Functions that were written for slime."""
