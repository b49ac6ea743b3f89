"""A container on the node's own files: a root of its own, in which the folder that all nodes share
is hidden but for what is mounted.

    container.py PLAN COMMAND...           as one task of srun, in place of pyxis; ``enroot`` imports it
    container.py --join PLAN COMMAND...    beside it: pyxis with --container-name alone

An image is a file that begins with ``hsqs`` (squashfs); JSON follows: ``environment`` of the image,
``hides``: the folder that is not in it. Environment as measured with pyxis 0.24: the host's,
without its language, the image's over it but for --container-env; PATH always the image's. Scope as
pyxis' default, "global": what is extracted stays.

As with the real tools, the root of a container is a bind mount of DATA/NAME. That is how its
processes are found, and where DATA is a bind mount itself they are not (enroot 4.1.2,
src/runtime.sh, runtime::list).
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

MAGIC = "hsqs"
LANGUAGE = ("LANG", "LC_ALL", "LANGUAGE")
IN_ENROOT_CONF = os.environ.get("STANDIN_ENROOT_DATA", "/tmp/enroot-data")
# pyxis does not read the job's own ENROOT_DATA_PATH.
DATA = Path(
    IN_ENROOT_CONF if __name__ == "__main__" else os.environ.get("ENROOT_DATA_PATH", IN_ENROOT_CONF)
)


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
        lines = (
            f"failed to create container filesystem for image: {path}",
            "printing enroot log file:",
        )
        lines += (f"    {error.code}", "couldn't start container")
        name = f"slurmstepd-{os.uname().nodename}: error: "
        text = "".join(f"{name}pyxis: {line}\n" for line in lines)
        print(text + name + "Failed to invoke spank plugin stack", file=sys.stderr)
        sys.exit(1)


def extract(image, name):
    """DATA/NAME with the links at the top of the root, as unsquashfs makes them one after the
    other.
    """
    root = DATA / name
    if "/" in name or root.exists():
        sys.exit(f"[ERROR] File already exists: {root}")
    read_image(image)
    print("[INFO] Extracting squashfs filesystem...", file=sys.stderr, flush=True)
    time.sleep(0.2)  # another node that shares DATA begins as well
    root.mkdir(parents=True, exist_ok=True)
    for entry in filter(Path.is_symlink, Path("/").iterdir()):
        try:
            (root / entry.name).symlink_to(os.readlink(entry))
        except FileExistsError:
            sys.exit(
                f"create_inode: failed to create symlink {root / entry.name}, because File exists"
            )
    shutil.copy(image, root / ".image")


def running(name, *, as_enroot_finds_it=False):
    """Ids of the processes in a container, the first in ``lsns``' order."""
    below = ""
    if as_enroot_finds_it:
        point = subprocess.run(
            ["stat", "-c", "%m", DATA], check=True, capture_output=True, text=True
        ).stdout.strip()
        below = "/" + os.path.relpath(DATA, point) + "/"
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = (process / "mountinfo").read_text().splitlines()
        except OSError:
            continue
        sources = [fields[3] for fields in map(str.split, lines) if fields[4] == "/"]
        if any(
            source == below + name if below else source.endswith("/" + name) for source in sources
        ):
            found.append(int(process.name))
    return sorted(found)


def enter(name, mounts, environment, command):
    """Replace this process by the command, in a mount namespace whose root is DATA/NAME."""
    image = read_image(DATA / name / ".image")
    plan = json.dumps({"root": str(DATA / name), "hides": image["hides"], "mounts": mounts})
    inner = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "/usr/bin/python3",
        __file__,
        "--inside",
        plan,
        *command,
    ]
    os.execvpe("unshare", inner, environment)


def join(pid, environment, command):
    """Replace this process by the command, in the namespace of a running container."""
    inner = ["nsenter", f"--target={pid}", "--mount", "--root", "--wd", *command]
    os.execve("/usr/bin/nsenter", inner, environment)


_CHDIR = "import os, sys; os.chdir(sys.argv[1]); os.execvp(sys.argv[2], sys.argv[2:])"


def mount(*arguments):
    subprocess.run(["/bin/mount", *arguments], check=True)


def inside(plan, command):
    root = Path(plan["root"])
    descriptors = []
    for source, target, _ in plan["mounts"]:
        if not Path(source).exists():
            sys.exit(
                f"enroot-mount: failed to mount: {source} at {root}{target}: No such file or directory"
            )
        descriptors.append(os.open(source, os.O_PATH))
    mount("--bind", str(root), str(root))
    for entry in Path("/").iterdir():
        if entry.is_dir() and not entry.is_symlink():
            (root / entry.name).mkdir(exist_ok=True)
            mount("--rbind", str(entry), f"{root}/{entry.name}")
    mount("-t", "tmpfs", "tmpfs", f"{root}{plan['hides']}")
    for descriptor, (_, target, read_only) in zip(descriptors, plan["mounts"], strict=True):
        if not Path(target).is_relative_to(plan["hides"]):
            sys.exit(f"container stand-in: can only mount below {plan['hides']}, not at {target}")
        place = f"{root}{target}"
        Path(place).mkdir(parents=True, exist_ok=True)
        # As it is, for the path that the link stands for is covered now.
        mount("--no-canonicalize", "--bind", f"/proc/{os.getpid()}/fd/{descriptor}", place)
        if read_only:
            mount("-o", "remount,bind,ro", place)
    for descriptor in descriptors:
        os.close(descriptor)
    os.chroot(root)
    os.chdir(os.environ.pop("STANDIN_WORKDIR", "/"))
    try:
        os.execvp(command[0], command)
    except OSError as error:  # as slurmstepd does
        print(
            f"slurmstepd-{os.uname().nodename}: error: execve(): {command[0]}: {error.strerror}",
            file=sys.stderr,
        )
        sys.exit(error.errno)


def pyxis_environment(image, plan):
    host = {name: value for name, value in os.environ.items() if name not in LANGUAGE}
    kept = {name: host[name] for name in plan["host_wins"]}
    environment = {**host, **image["environment"], **kept, "STANDIN_WORKDIR": plan["workdir"]}
    environment["PATH"] = image["environment"]["PATH"]
    return environment


def main():
    if sys.argv[1] == "--inside":
        inside(json.loads(sys.argv[2]), sys.argv[3:])
    is_joining = sys.argv[1] == "--join"
    plan, *command = sys.argv[2:] if is_joining else sys.argv[1:]
    plan = json.loads(plan)
    name = f"pyxis_{plan['name']}"
    if not is_joining:
        read_image_as_pyxis(plan["image"])
        extract(plan["image"], name)
    elif not (DATA / name).is_dir():
        sys.exit(f"container stand-in: pyxis: no container image given for {name}")
    environment = pyxis_environment(read_image(DATA / name / ".image"), plan)
    found = running(name, as_enroot_finds_it=True) if is_joining else []
    if found:
        join(found[0], environment, ["/usr/bin/python3", "-c", _CHDIR, plan["workdir"], *command])
    enter(name, plan["mounts"], environment, command)


if __name__ == "__main__":
    main()
