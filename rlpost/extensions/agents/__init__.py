"""Episodes of environments as answers, sandboxes for the commands of agents."""
