"""Rehearsal: the ranks of a configuration built on the meta device, one after another in one process.

Input: the settings of a recipe and the description of its model. Output: facts about each rank (groups, weights,
optimizer shards, parts of a checkpoint), the weight-update plan, and a list of what contradicts the planner or the
model that transformers builds. No collective runs and no tensor has data.
"""
