"""Rehearsal of every rank of a run on one machine without GPUs."""
