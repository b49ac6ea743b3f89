"""Resources that a run needs, from its settings alone: memory, files, time of a step. Pure.

``shape`` counts parameters, ``activations`` what a forward pass keeps, ``estimate`` adds both up
for the settings. ``step_time`` says how long a step takes, and ``layout_search`` finds layouts with
shorter ones. Sizes are bytes unless a name says otherwise.
"""
