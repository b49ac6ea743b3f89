"""Modules that change the environment; ``tests/unit/test_environment_of_tests.py`` runs them."""
