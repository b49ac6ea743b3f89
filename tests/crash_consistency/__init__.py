"""A simulator of crashes: the real driver on a folder whose every file operation may be the last,
fail or be lost.
"""
