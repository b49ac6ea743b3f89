"""Examples of environments."""
