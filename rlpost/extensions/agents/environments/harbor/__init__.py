"""Tasks in Harbor's format (Terminal-Bench 2): reading, roots without Docker, verification."""
