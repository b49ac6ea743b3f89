"""Login node and batch host: job spec, sbatch text, submission, states.

Knows Slurm and run folders, nothing of RL.
"""
