"""A run in this process, step by step: no Ray, no engines, no Slurm.

``InProcessRun`` is for a Python shell or a notebook: it trains with the functions of a run, on one
device, and a step returns what the step saw.
"""
