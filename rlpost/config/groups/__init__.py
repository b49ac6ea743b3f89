"""The groups of settings, one file a table of the recipe. ``rlpost.config.tree`` joins them."""
