"""Run slime plug-ins unchanged: filters, rewards, generate functions.

    signatures      detect the interface of a function from its signature (login node and nodes)
    provided_names  the modules and names of slime that are provided; pure data
    modules         the import hook that provides ``slime`` where it is not installed
    sample          slime's ``Sample``, made from rlpost's types
    arguments       the ``args`` of a plug-in: the settings of the run under slime's names
    engines         requests to the engines of the run: ``post``, ``GenerateState``
    generate        generate functions, and the conversion of their samples to rlpost's
    filters         filters of groups and of the buffer
    rewards         reward functions, and the names of ``slime.rollout.rm_hub``
    post_process    post-processing of rewards
    flags           flags of slime that rlpost lacks; pure data

The interface is that of github.com/THUDM/slime at commit 624b824
(docs/en/get_started/customization.md there).
"""
