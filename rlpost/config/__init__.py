"""Settings: a typed tree, its loading, its checks and derived values.

Imports neither torch nor ray.
"""

from rlpost.config.tree import Config

__all__ = ["Config"]
