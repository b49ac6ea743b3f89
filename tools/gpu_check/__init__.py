"""``make test-gpu``: every check that needs a GPU, and one table of what came of them."""
