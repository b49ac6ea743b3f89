"""Code that runs inside the allocation: agents that bring up a Ray cluster, run the driver and
write a verdict.
"""
