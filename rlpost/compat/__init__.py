"""Functions of the user's own that were written for another trainer."""
