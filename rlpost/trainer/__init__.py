"""Training on Megatron-core.

Importing this package installs the CPU stand-in for CUDA (``megatron_on_cpu``) and hides packages
that Megatron imports and ranks do not use (``optional_packages``), and sets what TransformerEngine
reads while it is imported (``fp8_grid``), so that its modules can import
``megatron.core`` at their top. This costs nothing if megatron is never imported.
"""

from rlpost.trainer.fp8_grid import prepare as _prepare_fp8
from rlpost.trainer.megatron_on_cpu import install as _install
from rlpost.trainer.optional_packages import prepare as _prepare

_install()
_prepare()
_prepare_fp8()
