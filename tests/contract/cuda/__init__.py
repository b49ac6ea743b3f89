"""The branches of the trainer that need CUDA or TransformerEngine, reached on a CPU.

``stub/`` holds a stand-in for TransformerEngine that builds and does not compute, ``fakes.py``
fakes CUDA, ``observations.py`` runs in a process of its own and prints what it saw, the tests judge
that.
"""
