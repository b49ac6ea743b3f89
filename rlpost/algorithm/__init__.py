"""Advantages, losses and the schedule of micro-batches. Pure."""
