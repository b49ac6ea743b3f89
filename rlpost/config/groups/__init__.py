"""The groups of settings, one module per recipe table. ``rlpost.config.tree`` joins them."""
