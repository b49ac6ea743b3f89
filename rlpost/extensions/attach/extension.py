"""The row of commands on the nodes of a run."""

from rlpost.config.extensions import Extension, Verb

_MODULE = "rlpost.extensions.attach.attach_verbs"

EXTENSION = Extension(
    name="attach",
    verbs={
        "attach": Verb(f"{_MODULE}:attach_main", "a shell on a node of a run", after="logs"),
        "exec": Verb(f"{_MODULE}:exec_main", "a command on every node of a run", after="attach"),
        "tunnel": Verb(f"{_MODULE}:tunnel_main", "the way to Ray's dashboard", after="exec"),
    },
    moved={
        "rlpost.cli.attach": "rlpost.extensions.attach.attach_verbs",
    },
)
