"""A lab with slurmdbd: accounts, QOS and their limits are enforced.

The database is MariaDB in the network of the controller, with its files in the lab's folder.
"""

from __future__ import annotations

import shutil

from tests.cluster.lab import Lab
from tests.cluster.lab_config import CONTROLLER, LabOptions
from tests.cluster.lab_host import LabError, do, search_path, wait_until

PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db")
SETTINGS = (
    "AccountingStorageType=accounting_storage/slurmdbd",
    "AccountingStorageHost=127.0.0.1",
    "AccountingStoragePass=@BASE@/munge.socket",
    "AccountingStorageEnforce=limits,qos",
    "AccountingStorageTRES=gres/gpu",
)
SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket=@BASE@/munge.socket
DbdHost=ctl
DbdAddr=127.0.0.1
SlurmUser=root
LogFile=@BASE@/log/slurmdbd.log
PidFile=@BASE@/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageUser=root
StorageLoc=slurm_acct_db
"""


def why_no_accounting() -> str | None:
    """Return the reason why no lab with slurmdbd can run here, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]
    if missing:
        return (
            f"a lab with accounting needs {', '.join(missing)}; on Debian: apt-get install "
            "--no-install-recommends slurmdbd mariadb-server"
        )
    return None


class AccountingLab(Lab):
    """As ``Lab``, of this machine's Slurm. ``account`` adds accounts and limits while it is up."""

    def __init__(self, num_nodes: int, *, name: str) -> None:
        files = (("slurmdbd.conf", SLURMDBD_CONF),)
        options = LabOptions(settings=SETTINGS, files=files)
        super().__init__(num_nodes, name=name, options=options)

    def account(self, *words: str) -> None:
        """Call sacctmgr. Raises LabError."""
        self.run(CONTROLLER, ["sacctmgr", "--immediate", "--quiet", *words])

    def _start_accounting(self) -> None:
        folder, inside = self.base / "database", ["ip", "netns", "exec", self._netns(CONTROLLER)]
        do(
            "mariadb-install-db",
            "--no-defaults",
            "--user=root",
            f"--datadir={folder}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
        )
        # skip-grant-tables: slurmdbd alone is in this network
        places = [f"--datadir={folder}", f"--socket={folder}/socket", f"--pid-file={folder}/pid"]
        server = ["mariadbd", "--no-defaults", "--user=root", "--skip-grant-tables", *places]
        self._start("mariadbd", [*inside, *server, "--bind-address=127.0.0.1"])
        if not wait_until((folder / "socket").exists, deadline_s=60.0):
            raise LabError(f"mariadbd does not start\n{self.log_tail()}")
        start = f"hostname {CONTROLLER} && exec slurmdbd -D"  # which runs on DbdHost alone
        self._start("slurmdbd", [*inside, "unshare", "--uts", "sh", "-c", start])
        conf = f"SLURM_CONF={self.base}/etc/slurm.conf"
        add = [*inside, "env", conf, "sacctmgr", "--immediate", "--quiet", "add", "cluster", "lab"]

        said: list[str] = []

        def is_registered() -> bool:
            try:
                do(*add)
            except LabError as error:
                said[:] = [str(error)]
                return False
            return True

        if not wait_until(is_registered, deadline_s=30.0, interval_s=0.5):
            raise LabError(f"slurmdbd does not answer: {said}\n{self.log_tail()}")
