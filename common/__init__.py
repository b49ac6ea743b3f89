"""Run files and formats shared by login node, batch host, agents and driver. Standard library
only.
"""
