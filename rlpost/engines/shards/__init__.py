"""Weight updates in which an engine rank receives only the slices that it holds."""
