"""Which interface, RDMA devices and variables a node uses: facts, pure rules, and one answer."""
