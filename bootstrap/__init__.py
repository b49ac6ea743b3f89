"""Inside the allocation: one agent a node makes a Ray cluster, runs the driver and ends with a verdict."""
