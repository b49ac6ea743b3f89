"""Stub of what Megatron-core 0.16.1 imports of TransformerEngine 2.11, for tests on a CPU.

Modules can be built but compute nothing. Names, shapes and attributes of the parameters, and what
the modules add to a state dict, are those of release v2.11
(``transformer_engine/pytorch/module/*.py``, ``ops/op.py``). Calling a kernel raises
NotImplementedError.
"""

from transformer_engine import common, pytorch

__version__ = "2.11.0"
__all__ = ["common", "pytorch"]
