"""Commit protocol and the state that one commit holds."""
