"""One agent a node: the nodes meet, bring up Ray, run the driver and end with a verdict."""
