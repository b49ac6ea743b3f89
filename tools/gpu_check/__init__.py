"""``make test-gpu``: every check that needs a GPU, with one table of results."""
