"""``ray start --block`` without Ray: says that it runs and stays until it is told to end."""

import signal

print("Ray runtime started", flush=True)
signal.pause()
