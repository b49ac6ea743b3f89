"""Training: the Megatron-core side of the run.

Every module of this package may import ``megatron.core`` at its top: the line below makes sure that the stand-in for
CUDA is in place before the first of them does. It costs nothing where megatron is never imported.
"""

from rlpost.actor.megatron_on_cpu import install as _install

_install()
