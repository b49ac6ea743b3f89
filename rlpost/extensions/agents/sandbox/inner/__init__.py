"""The part of a sandbox that runs in a separate interpreter; standard library only.

The driver starts it with ``python -I -S`` and an empty environment, so its memory holds no token
and no setting of the run. It becomes the first process of the sandbox.
"""
