"""Read a compose file whose only service is ``main``, which a Dockerfile's root can stand for. Pure.

Input: the text of environment/docker-compose.yaml. Output: the folder from which the Dockerfile
copies, ``environment`` or ``.`` (the task's). Harbor's own variables stand for what it adds itself:
the context, the name of the image, limits, and folders of logs.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Any

import yaml

MAX_BYTES = 64 << 10
"""Of a file: the parser takes seconds for each MiB."""
MAX_DEPTH = 32
SERVICE_KEYS = frozenset({"build", "image", "command", "deploy", "volumes"})
_CONTEXT = re.compile(r"\$\{CONTEXT_DIR\}(/\.\.)?/?|\.\.?/?")
_LOGS = re.compile(r"\$\{HOST_\w*LOGS_PATH\}:\$\{ENV_\w*LOGS_PATH\}")


class ComposeUnsupported(ValueError):
    """A compose file says more than a Dockerfile does; the text names what."""


def read_compose(text: str) -> str:
    """Return the folder of the Dockerfile's context. Raises ComposeUnsupported."""
    if len(text) > MAX_BYTES:
        raise ComposeUnsupported(f"more than {MAX_BYTES >> 10} KiB")
    try:
        _check_events(text)
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, ComposeUnsupported):
            raise
        raise ComposeUnsupported(f"no YAML: {' '.join(str(error).split())[:200]}") from None
    services = _table(content, {"services", "version", "name"}, "the file")["services"]
    main = _table(_table(services, {"main"}, "services")["main"], SERVICE_KEYS, "main")
    command = main.get("command", "sleep infinity")
    words = command if isinstance(command, str) else " ".join(map(str, command or ()))
    if words.split()[-2:] != ["sleep", "infinity"]:
        raise ComposeUnsupported(f"command {words[:80]!r}")
    if not str(main.get("image", "${MAIN_IMAGE_NAME}")).startswith("${MAIN_IMAGE_NAME"):
        raise ComposeUnsupported(f"image {main['image']!r:.80}")
    volumes = main.get("volumes") or []
    other = [each for each in volumes if not (isinstance(each, str) and _LOGS.fullmatch(each))]
    if other:
        raise ComposeUnsupported(f"volumes {other[0]!r:.80}")
    resources = _table(main.get("deploy", {}), {"resources"}, "deploy").get("resources", {})
    limits = _table(resources, {"limits"}, "resources").get("limits", {})
    _table(limits, {"cpus", "memory"}, "limits")
    return _context(main.get("build", "."))


def _check_events(text: str) -> None:
    """Raise ComposeUnsupported for what makes a small text expensive. Raises YAMLError."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):  # aliases of aliases are exponentially long
            raise ComposeUnsupported("an alias")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:  # the scanner takes a millisecond for each further level
            raise ComposeUnsupported(f"more than {MAX_DEPTH} nested values")


def _context(build: object) -> str:
    """Return the folder of a ``build``, whose Dockerfile is environment/Dockerfile."""
    values = {"context": build} if isinstance(build, str) else build
    values = _table(values, {"context", "dockerfile"}, "build")
    context, dockerfile = (
        str(values.get("context", ".")),
        str(values.get("dockerfile", "Dockerfile")),
    )
    if not _CONTEXT.fullmatch(context):
        raise ComposeUnsupported(f"build context {context!r:.80}")
    folder = "." if ".." in context else "environment"
    if posixpath.normpath(posixpath.join(folder, dockerfile)) != "environment/Dockerfile":
        raise ComposeUnsupported(f"build dockerfile {dockerfile!r:.80}")
    return folder


def _table(value: Any, keys: frozenset[str] | set[str], name: str) -> Mapping[str, Any]:
    """Return a mapping that has no other keys, and ``services`` or ``main`` if it may."""
    if not isinstance(value, Mapping):
        raise ComposeUnsupported(f"{name} is no table")
    if other := sorted(str(key) for key in value.keys() - keys):
        raise ComposeUnsupported(f"{name} has {', '.join(other)[:80]}")
    if required := {"services", "main"} & keys - value.keys():
        raise ComposeUnsupported(f"{name} has no {required.pop()}")
    return value
