"""Agents: episodes of many turns, the gateway that serves them, environments and sandboxes."""
