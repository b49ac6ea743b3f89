"""Detect the network interface, RDMA devices and variables that a node uses, from its facts."""
