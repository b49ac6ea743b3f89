"""What can be known wrong from settings alone, one file a subject. ``rlpost.check`` adds what reads
files.
"""
