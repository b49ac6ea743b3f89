"""The agents, one per node: rendezvous, Ray bring-up, driver, verdict."""
