"""A crash simulator that runs the real driver on a simulated disk.

Each file operation may be the last, may fail, or may be lost.
"""
