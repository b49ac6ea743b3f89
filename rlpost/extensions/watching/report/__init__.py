"""The page of a run: facts in, one HTML file out."""
