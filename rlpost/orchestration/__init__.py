"""Placement, Ray workers, the loop, preemption."""
