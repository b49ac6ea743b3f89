"""Training and serving on machines without a GPU."""
