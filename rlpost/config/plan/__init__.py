"""Sizes that follow from the settings and the model alone. Pure.

``shape`` counts parameters, ``architecture`` reads them, ``weight_update`` and ``shard_plan`` divide
the weights of an update. Sizes are bytes unless a name says otherwise.
"""
