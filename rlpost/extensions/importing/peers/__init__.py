"""Keys of verl and NeMo-RL: one row for each, with its settings here or the reason why not."""
