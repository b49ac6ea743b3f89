"""The bring-up of a job on one machine: a real head, simulated nodes, a stub of Ray."""
