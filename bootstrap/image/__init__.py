"""Check a container image for what a run needs.

Runs on Python 3.8 with the standard library only.
"""
