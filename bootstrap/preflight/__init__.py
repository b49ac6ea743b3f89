"""What is examined on a node before Ray starts, and the table of all nodes."""
