"""What login node, batch host, agents and driver agree on: files of a run and their formats. Standard library only."""
