"""A container without a root of its own: the node's files; of the folder that all nodes share only what is mounted.

    container.py PLAN COMMAND...      as one task of srun, in place of pyxis; ``enroot`` imports it

An image is a file that begins with ``hsqs`` (squashfs); JSON follows: ``environment`` of the image, ``hides``: the
folder that is not in it. Environment as measured with pyxis 0.24: the host's, without its language, the image's over it
but for --container-env; PATH always the image's.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

MAGIC = "hsqs"
LANGUAGE = ("LANG", "LC_ALL", "LANGUAGE")


def read_image(path):
    """The image; in the words of enroot 4.1.2 where it is missing or none."""
    if not Path(path).exists():
        sys.exit(f"[ERROR] No such file or directory: {path}")
    text = Path(path).read_text()
    if not text.startswith(MAGIC):
        sys.exit(f"[ERROR] Invalid image format: {path}")
    return json.loads(text.removeprefix(MAGIC))


def read_image_as_pyxis(path):
    """The same; what enroot says, pyxis 0.24 quotes."""
    try:
        return read_image(path)
    except SystemExit as error:
        lines = (f"failed to create container filesystem for image: {path}", "printing enroot log file:")
        lines += (f"    {error.code}", "couldn't start container")
        name = f"slurmstepd-{os.uname().nodename}: error: "
        text = "".join(f"{name}pyxis: {line}\n" for line in lines)
        print(text + name + "Failed to invoke spank plugin stack", file=sys.stderr)
        sys.exit(1)


def enter(image, mounts, environment, command):
    """Replace this process by the command, in a mount namespace that shows what is mounted."""
    plan = json.dumps({"hides": image["hides"], "mounts": mounts})
    inner = ["unshare", "--mount", "--propagation", "private", "/usr/bin/python3", __file__, "--inside", plan, *command]
    os.execvpe("unshare", inner, environment)


def mount(*arguments):
    subprocess.run(["/bin/mount", *arguments], check=True)


def inside(plan, command):
    hides = Path(plan["hides"])
    descriptors = []
    for source, _, _ in plan["mounts"]:
        if not Path(source).exists():
            sys.exit(f"container stand-in: mount source {source} does not exist")
        descriptors.append(os.open(source, os.O_PATH))
    mount("-t", "tmpfs", "tmpfs", str(hides))
    for descriptor, (_, target, read_only) in zip(descriptors, plan["mounts"], strict=True):
        if not Path(target).is_relative_to(hides):
            sys.exit(f"container stand-in: can only mount below {hides}, not at {target}")
        Path(target).mkdir(parents=True, exist_ok=True)
        # As it is, for the path that the link stands for is covered now.
        mount("--no-canonicalize", "--bind", f"/proc/{os.getpid()}/fd/{descriptor}", target)
        if read_only:
            mount("-o", "remount,bind,ro", target)
    if workdir := os.environ.pop("STANDIN_WORKDIR", ""):
        os.chdir(workdir)
    try:
        os.execvp(command[0], command)
    except OSError as error:  # as slurmstepd does
        print(f"slurmstepd-{os.uname().nodename}: error: execve(): {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(error.errno)


def main():
    if sys.argv[1] == "--inside":
        inside(json.loads(sys.argv[2]), sys.argv[3:])
    plan, command = json.loads(sys.argv[1]), sys.argv[2:]
    image = read_image_as_pyxis(plan["image"])
    host = {name: value for name, value in os.environ.items() if name not in LANGUAGE}
    kept = {name: host[name] for name in plan["host_wins"]}
    environment = {**host, **image["environment"], **kept, "STANDIN_WORKDIR": plan["workdir"]}
    environment["PATH"] = image["environment"]["PATH"]
    enter(image, plan["mounts"], environment, command)


if __name__ == "__main__":
    main()
