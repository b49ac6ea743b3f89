"""Download a recipe's models and data sets from the Hugging Face hub to a shared folder.

A thin layer over ``huggingface_hub`` (listings, downloads) and ``filelock`` (one fetch at a time).
``snapshot_download`` alone checks sizes but not digests, and shows files under their final names
before the repository is complete.

Invariant: a folder appears under its final name only after every file in it was checked.
"""
