"""Stands where the project's code stands when a batch script is tested without Ray: the same
command line, no work.
"""
