"""Functions that were written for another trainer."""
