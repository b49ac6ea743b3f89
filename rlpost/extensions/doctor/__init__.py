"""``rlpost doctor``: diagnose a machine or an image outside a run."""
