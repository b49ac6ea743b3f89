"""Models and data sets of a recipe, fetched from the Hugging Face hub into the folder that all nodes see.

A thin layer over ``huggingface_hub`` (what a repository holds, HTTP with retries) and ``filelock`` (one fetch at a
time). ``snapshot_download`` is not enough: it discards the part of a file that a killed process leaves, checks sizes
but no digests, and shows files under their final names before the repository is complete. Invariant: a folder appears
under its name only when every file in it was checked.
"""
