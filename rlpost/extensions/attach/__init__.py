"""Commands on the nodes of a running job."""
