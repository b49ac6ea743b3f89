"""Advantages, losses and the schedule of micro-batches: pure."""
