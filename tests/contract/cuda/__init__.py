"""Tests on a CPU of the trainer's branches that need CUDA or TransformerEngine.

``stub/`` is a stub of TransformerEngine whose modules are built but compute nothing. ``fakes.py``
fakes CUDA. ``observations.py`` runs in a separate process and prints what the trainer built; the
tests check its output.
"""
