"""Checks of the settings alone, one file per subject. ``rlpost.check`` adds checks of files."""
