"""Training on Megatron-core.

Importing this package installs the CPU stand-in for CUDA (``megatron_on_cpu``) and hides packages
that Megatron imports and ranks do not use (``optional_packages``), so that its modules can import
``megatron.core`` at their top. This costs nothing if megatron is never imported.
"""

from rlpost.trainer.megatron_on_cpu import install as _install
from rlpost.trainer.optional_packages import prepare as _prepare

_install()
_prepare()
