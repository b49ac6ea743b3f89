"""Training on Megatron-core.

Importing this package makes Megatron-core usable without a GPU, if an extension can, hides packages
that Megatron imports and ranks do not use (``optional_packages``), and sets what TransformerEngine
reads while it is imported (``fp8_grid``), so that its modules can import
``megatron.core`` at their top. This costs nothing if megatron is never imported.
"""

from rlpost.config.extensions import prepare_trainer as _prepare_trainer
from rlpost.trainer.fp8_grid import prepare as _prepare_fp8
from rlpost.trainer.optional_packages import prepare as _prepare

_prepare_trainer()
_prepare()
_prepare_fp8()
