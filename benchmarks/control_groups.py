"""Control groups of Linux that stand for machines of unequal CPUs and memory, in version 1 and 2 of their interface.

    with Groups() as groups:
        small = groups.make("small", cpus=0.25, memory=800 << 20)
        subprocess.run([...])          # in it: control_groups.enter(small.entrances), before anything large is loaded
        print(small.peak(), small.killed())

The groups are made below the one that this process is in, which takes root, or a scope of systemd that is delegated:
`systemd-run --user --scope -p Delegate=yes python ...`. Only the standard library is needed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PERIOD = 100_000
"""Microseconds in which a group may use its share of the CPUs."""
ENDS_WITHIN = 20.0
"""Seconds that the processes of a group get to vanish once they are killed."""


class Unavailable(Exception):
    """Says why control groups cannot be made here, and what would help."""


@dataclass(frozen=True)
class Group:
    """The limits of one emulated machine.

    Attributes:
        cpu: Folder of the group that limits CPUs.
        memory: Folder of the group that limits memory; the same in version 2.
        limit: Bytes.
    """

    cpu: Path
    memory: Path
    limit: int

    @property
    def folders(self) -> list[Path]:
        """Each folder once."""
        return list(dict.fromkeys([self.cpu, self.memory]))

    @property
    def entrances(self) -> list[str]:
        """The files that take a process into the group."""
        return [str(folder / "cgroup.procs") for folder in self.folders]

    def processes(self) -> list[int]:
        """Those that are in the group."""
        return [int(word) for folder in self.folders for word in _read(folder / "cgroup.procs").split()]

    def peak(self) -> int:
        """Most bytes that were in use at once, file cache that could have been dropped included; 0 if not known."""
        return _number(self.memory / "memory.peak") or _number(self.memory / "memory.max_usage_in_bytes")

    def killed(self) -> int:
        """Processes that the kernel has killed because memory ran out."""
        return _field(self.memory / "memory.events", "oom_kill") or _field(
            self.memory / "memory.oom_control", "oom_kill"
        )


def enter(entrances: Iterable[str]) -> None:
    """Moves this process into a group; what it has in memory by then stays on the account of its old group."""
    for path in entrances:
        Path(path).write_text(f"{os.getpid()}\n")


class Groups:
    """Makes groups, and removes them with all that is still in them.

    Args:
        root: The folder that holds `proc` and `sys`, so that recorded trees of other machines can be tested.

    Raises:
        Unavailable: On entering it, or in :meth:`make`.
    """

    def __init__(self, root: str | Path = "/") -> None:
        self.root = Path(root)
        self.made: list[Group] = []
        self._refuge: Path | None = None

    def __enter__(self) -> Groups:
        self._own = {name: self._find(name) for name in ("cpu", "memory")}
        self.version = 2 if self._own["cpu"] == self._own["memory"] and self._unified(self._own["cpu"]) else 1
        try:
            if self.version == 2:
                self._delegate(self._own["cpu"])
        except OSError as error:
            self._withdraw()
            raise self._unavailable(error) from error
        return self

    def __exit__(self, *exception: object) -> None:
        for group in self.made:
            _clear(group)
        self._withdraw()

    def make(self, name: str, cpus: float, memory: int) -> Group:
        """Makes a group with so many CPUs' worth of time and so many bytes, swap not used where that can be said."""
        name = f"{name}-{os.getpid()}"
        group = Group(self._own["cpu"] / name, self._own["memory"] / name, memory)
        try:
            for folder in group.folders:
                folder.mkdir()
            self.made.append(group)
            _limit(group, cpus, self.version)
        except OSError as error:
            raise self._unavailable(error) from error
        return group

    def _find(self, controller: str) -> Path:
        """Returns the folder of this process's own group of a controller."""
        paths: dict[str, str] = {}
        for line in _read(self.root / "proc/self/cgroup").splitlines():
            _, names, path = line.split(":", 2)
            if not names or controller in names.split(","):
                paths["cgroup" if names else "cgroup2"] = path
        for line in _read(self.root / "proc/self/mountinfo").splitlines():
            mount, _, filesystem = line.partition(" - ")
            kind, _, options = filesystem.split(" ", 2)
            _, _, _, mount_root, point, *_ = mount.split(" ")
            governs = kind == "cgroup2" or controller in options.split(" ")[-1].split(",")
            if kind not in paths or not governs:
                continue
            inside = paths[kind].removeprefix(mount_root.rstrip("/")).strip("/")
            folder = self.root / point.lstrip("/") / inside
            if kind == "cgroup" or controller in _read(folder / "cgroup.controllers").split():
                return folder
        raise Unavailable(f"no control groups for {controller} are mounted (needs Linux)")

    @staticmethod
    def _unified(folder: Path) -> bool:
        return (folder / "cgroup.controllers").is_file()

    def _delegate(self, own: Path) -> None:
        """Hands the controllers down; a group of version 2 that does so may hold no processes, so this one moves."""
        if own != own.parent and (own / "cgroup.type").is_file():  # the root group has no such file, and may hold some
            self._refuge = own / f"launcher-{os.getpid()}"
            self._refuge.mkdir()
            enter([str(self._refuge / "cgroup.procs")])
        (own / "cgroup.subtree_control").write_text("+cpu +memory")

    def _withdraw(self) -> None:
        if self._refuge is None:
            return
        own = self._refuge.parent
        try:
            (own / "cgroup.subtree_control").write_text("-cpu -memory")
            enter([str(own / "cgroup.procs")])
            self._refuge.rmdir()
        except OSError as error:
            print(f"{self._refuge} stays behind: {error}")
        self._refuge = None

    def _unavailable(self, error: OSError) -> Unavailable:
        return Unavailable(
            f"control groups cannot be made below {self._own['memory']} ({error}): run it as root on the machine or in "
            "a privileged container, or with systemd as `systemd-run --user --scope -p Delegate=yes python ...`"
        )


def _limit(group: Group, cpus: float, version: int) -> None:
    quota = round(cpus * PERIOD)
    if version == 2:
        (group.cpu / "cpu.max").write_text(f"{quota} {PERIOD}")
        (group.memory / "memory.max").write_text(str(group.limit))
        swap = group.memory / "memory.swap.max", "0"
    else:
        (group.cpu / "cpu.cfs_period_us").write_text(str(PERIOD))
        (group.cpu / "cpu.cfs_quota_us").write_text(str(quota))
        (group.memory / "memory.limit_in_bytes").write_text(str(group.limit))
        swap = group.memory / "memory.swappiness", "0"
    if swap[0].exists():  # not on a kernel without swap
        swap[0].write_text(swap[1])


def _clear(group: Group) -> None:
    """Kills what is left in a group and removes it."""
    deadline = time.monotonic() + ENDS_WITHIN
    for folder in group.folders:
        while folder.exists():
            for process in map(int, _read(folder / "cgroup.procs").split()):
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # it has ended by itself meanwhile
            try:
                folder.rmdir()
            except OSError as error:  # busy until the last one is gone
                if time.monotonic() > deadline:
                    print(f"{folder} stays behind: {error}")
                    break
                time.sleep(0.05)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _read(path).strip()
    return int(text) if text.isdigit() else 0


def _field(path: Path, name: str) -> int:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
