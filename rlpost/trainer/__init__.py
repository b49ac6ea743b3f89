"""Training on Megatron-core.

Importing this package installs the CPU stand-in for CUDA (``megatron_on_cpu``) and decides whether
Megatron sees DeepEP (``deep_ep``), so that its modules can import ``megatron.core`` at their top.
This costs nothing if megatron is never imported.
"""

from rlpost.trainer.deep_ep import prepare as _prepare_deep_ep
from rlpost.trainer.megatron_on_cpu import install as _install

_install()
_prepare_deep_ep()
