"""Resources that a run needs, from its settings alone: memory of each phase, files. Pure.

``shape`` counts parameters, ``activations`` what a forward pass keeps, ``estimate`` adds both up
for the settings, ``layout_search`` finds other layouts. Sizes are bytes unless a name says
otherwise.
"""
