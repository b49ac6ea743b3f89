"""Plans: whether a run fits, how long a step takes, and which layouts are better."""
