"""What a run needs of its machines, from its settings alone: parameters, memory of each phase,
files. Pure.

``shape`` counts parameters, ``activations`` what a forward pass keeps, ``estimate`` joins them with
the settings, ``layouts`` looks for other layouts. All sizes are bytes unless a name says otherwise.
"""
