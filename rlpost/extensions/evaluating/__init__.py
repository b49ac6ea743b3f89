"""Evaluation of a model or of a step of a run."""
