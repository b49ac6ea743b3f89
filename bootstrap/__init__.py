"""Code that runs inside the allocation: agents, preflight, network detection."""
