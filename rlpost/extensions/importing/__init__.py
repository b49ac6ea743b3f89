"""``rlpost import``: a recipe from a script of slime, a command line of verl or YAML of NeMo-RL."""
