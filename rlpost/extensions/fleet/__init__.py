"""Engines that join and leave a run: preemptible jobs which only generate."""
