"""Run slime plug-ins unchanged: filters, rewards, generate functions.

    signatures    which interface a function has, read from its signature (login node and nodes)
    names         which modules and names of slime exist here; pure data
    modules       the import hook that answers for ``slime`` where slime is not installed
    sample        slime's ``Sample``, made from our nouns
    arguments     the ``args`` of a plug-in: the settings of the run under slime's names
    engines       requests to the engines of the run: ``post``, ``GenerateState``
    generate      generate functions, and their samples back as ours
    filters       filters of groups and of the buffer
    rewards       reward functions, and the names of ``slime.rollout.rm_hub``

The interface is that of github.com/THUDM/slime at commit 624b824 (docs/en/get_started/customization.md there).
"""
