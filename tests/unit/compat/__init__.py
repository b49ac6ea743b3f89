"""Tests of functions that were written for another trainer."""
