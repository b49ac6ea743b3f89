"""Grading: rewards by name, of users, of servers and of models, and the processes that run them."""
