"""What a container image has and lacks for a run. Runs on Python 3.8 with the standard library alone."""
