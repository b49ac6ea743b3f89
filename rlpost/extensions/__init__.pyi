# Written by tools/make_docs.py.
from rlpost.extensions.agents.environments.turns import Step as Step
from rlpost.extensions.agents.environments.turns import Turn as Turn
from rlpost.extensions.in_process.run import InProcessRun as InProcessRun
