"""Settings: one typed tree, its loading, its checks and what follows from it. Imports neither torch nor ray."""

from rlpost.config.tree import Config

__all__ = ["Config"]
