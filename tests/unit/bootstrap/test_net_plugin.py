"""NCCL's plug-in for libfabric is loaded as NCCL loads it, in a process of its own."""

import os
import subprocess
from pathlib import Path

from bootstrap.preflight.net_plugin import net_plugin_problem, plugin_files


def test_the_plugin_of_the_loader_s_path_is_loaded(tmp_path: Path) -> None:
    environ = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    environ.pop("NCCL_NET_PLUGIN", None)
    problem = net_plugin_problem(environ)
    assert problem is not None and "libnccl-net.so: cannot open" in problem
    library = tmp_path / "libnccl-net-ofi.so"
    subprocess.run(["cc", "-shared", "-o", library, "-x", "c", "/dev/null"], check=True)
    assert net_plugin_problem(environ) == ""


def test_a_plugin_that_ends_its_process_does_not_end_the_agent(tmp_path: Path) -> None:
    source = tmp_path / "abort.c"
    source.write_text("#include <stdlib.h>\n__attribute__((constructor)) void f() { abort(); }\n")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", tmp_path / "libnccl-net.so", source], check=True
    )
    problem = net_plugin_problem({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert problem is not None and "ended with -6" in problem


def test_the_site_s_name_is_tried_first() -> None:
    assert plugin_files({"NCCL_NET_PLUGIN": "aws"})[0] == "libnccl-net-aws.so"
    assert plugin_files({"NCCL_NET_PLUGIN": "/opt/a.so"})[0] == "/opt/a.so"
    assert plugin_files({}) == ["libnccl-net.so", "libnccl-net-ofi.so"]
