"""The CPUs and the memory that this process may really use.

`os.cpu_count()` and `psutil.virtual_memory()` describe the machine. Containers, batch systems and `taskset` give a
process less, through control groups (version 1 or 2, at any level up to the root), its CPU affinity and `ulimit`: a
batch size chosen by the machine's memory would get the process killed. Limits and use are read anew at each call, as
both change while a job runs.

The functions take the folder in which to find `proc` and `sys`, so that recorded trees of other machines can be tested.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

# Version 1 writes "no limit" as a number near 2**63, rounded down to pages.
_UNLIMITED = 1 << 60
_MACHINE = "machine"


def affinity() -> frozenset[int]:
    """Return the numbers of the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def available_cpus(root: str | Path = "/", affine: int | None = None) -> float:
    """Return how many CPUs' worth of time this process may use.

    Args:
        root: The folder that holds `proc` and `sys`.
        affine: Number of CPUs in the affinity mask; this process's own by default.

    Returns:
        The least of the affinity and the quotas of all its control groups, such as `0.5`.
    """
    root = Path(root)
    shares = [float(len(affinity()) if affine is None else affine)]
    for folder in _groups(root, "cpu"):
        quota, period = _quota(folder)
        if quota > 0 and period > 0:
            shares.append(quota / period)
    return min(shares)


def available_memory(root: str | Path = "/", sharers: Mapping[str, int] | None = None) -> int:
    """Return how many more bytes this process can use before it swaps, is refused memory, or is killed.

    Args:
        root: The folder that holds `proc` and `sys`.
        sharers: How many processes take from each of :func:`memory_pools`, when each is to have its part of what is
            left there; 1 where nothing is said.

    Returns:
        The least of what the machine has available, what each control group leaves (its limit less its use, where file
        cache that can be dropped does not count as use), and what `RLIMIT_AS` leaves of the address space.
    """
    root, sharers = Path(root), sharers or {}
    rooms = [_machine_memory(root) // sharers.get(_MACHINE, 1)]
    for folder in _groups(root, "memory"):
        rooms.extend(left // sharers.get(_identity(folder), 1) for left in _group_memory(folder))
    address_space = _address_space(root)
    if address_space is not None:
        rooms.append(address_space)
    return max(0, min(rooms))


def memory_pools(root: str | Path = "/") -> frozenset[str]:
    """Return names of what this process shares memory with: its machine, and its control groups up to the root.

    Two processes of one machine that have a name in common take from the same memory, in whatever containers they are.
    """
    return frozenset([_MACHINE, *map(_identity, _groups(Path(root), "memory"))])


def _identity(folder: Path) -> str:
    """Return a name of a control group that is the same in all containers, which see it by other paths."""
    try:
        found = folder.stat()
    except OSError:
        return str(folder)
    return f"{found.st_dev}:{found.st_ino}"


def resident_memory() -> int:
    """Return the bytes of this process that lie in the machine's memory now."""
    words = _text(Path("/proc/self/statm")).split()
    if len(words) > 1:
        return _number(words[1]) * os.sysconf("SC_PAGE_SIZE")
    import psutil  # systems without /proc

    return int(psutil.Process().memory_info().rss)


def peak_memory() -> int:
    """Return the most bytes of this process that lay in memory since the last :func:`reset_peak`, or its start."""
    for line in _lines(Path("/proc/self/status")):
        if line.startswith("VmHWM:"):
            return _number(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak() -> bool:
    """Let :func:`peak_memory` begin anew; False where the system does not let it, so that peaks only ever rise."""
    try:
        descriptor = os.open("/proc/self/clear_refs", os.O_WRONLY)
    except OSError:
        return False
    try:
        return os.write(descriptor, b"5") > 0
    except OSError:
        return False
    finally:
        os.close(descriptor)


def release_memory() -> bool:
    """Give memory that the C library keeps for later back to the system; False if there was none, or no way to.

    TensorFlow with oneDNN, its default on x86, keeps what its tensors held in a pool of its own, which nothing empties.
    """
    import ctypes

    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))  # glibc's
    except (OSError, AttributeError, TypeError):
        return False


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups that `controller` governs, from its own up to the root."""
    yield from _folders(root, controller, _text(root / "proc/self/cgroup"))


@functools.lru_cache(maxsize=32)
def _folders(root: Path, controller: str, membership: str) -> tuple[Path, ...]:
    """Return what :func:`_groups` yields; mounts are looked at only once, which takes most of the time."""
    paths = {}
    for line in membership.splitlines():
        _, names, path = line.split(":", 2)
        # Version 2 has one line without names, and all controllers in one tree.
        if not names or controller in names.split(","):
            paths["cgroup" if names else "cgroup2"] = path
    found: list[Path] = []
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and controller not in options.split(" ")[-1].split(",")):
            continue
        _, _, _, mount_root, mount_point = mount.split(" ")[:5]
        top = root / _unescape(mount_point).lstrip("/")
        found.extend(_upwards(top, paths[kind], mount_root))
    return tuple(found)


def _upwards(top: Path, path: str, mount_root: str) -> Iterator[Path]:
    """Yield the folder of group `path` below the mount `top`, then its parents up to `top`.

    In a container the mount often shows only the part of the tree below `mount_root`, and `path` may lead out of it;
    then `top` is all that can be seen.
    """
    inside = mount_root == "/" or path == mount_root or path.startswith(mount_root + "/")
    relative = path[len(mount_root.rstrip("/")) :].strip("/") if inside else ""
    folder = top / relative
    if ".." in folder.parts or not folder.is_dir():
        folder = top
    yield folder
    while folder != top:
        folder = folder.parent
        yield folder


def _quota(folder: Path) -> tuple[int, int]:
    """Return the CPU time in each period that a group may use, both in microseconds; 0 or less without a limit."""
    words = _text(folder / "cpu.max").split()
    if len(words) == 2:
        return _number(words[0]), _number(words[1])
    return _number(_text(folder / "cpu.cfs_quota_us")), _number(_text(folder / "cpu.cfs_period_us"))


def _group_memory(folder: Path) -> Iterator[int]:
    """Yield the bytes that the limits of one group leave."""
    statistics = dict(line.split(None, 1) for line in _lines(folder / "memory.stat"))
    if (folder / "memory.current").is_file():
        used = _number(_text(folder / "memory.current"))
        droppable = _number(statistics.get("inactive_file", ""))
        # Above memory.high the kernel slows the process down to a crawl instead of killing it: as useless.
        limits = [_text(folder / "memory.max"), _text(folder / "memory.high")]
    else:
        used = _number(_text(folder / "memory.usage_in_bytes"))
        droppable = _number(statistics.get("total_inactive_file", statistics.get("inactive_file", "")))
        # The last is the least limit of all parents, also of those that a container does not show.
        limits = [_text(folder / "memory.limit_in_bytes"), statistics.get("hierarchical_memory_limit", "")]
    for limit in map(_number, limits):
        if 0 <= limit < _UNLIMITED:
            yield limit - max(0, used - max(0, droppable))


def _machine_memory(root: Path) -> int:
    """Return the bytes that the whole machine has available."""
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return _number(line.split()[1]) * 1024
    import psutil  # systems without /proc

    return int(psutil.virtual_memory().available)


def _address_space(root: Path) -> int | None:
    """Return the bytes of address space that `ulimit -v` leaves to this process, None without a limit."""
    limit = -1
    for line in _lines(root / "proc/self/limits"):
        if line.startswith("Max address space"):
            limit = _number(line.split()[3])
    if limit < 0:
        return None
    for line in _lines(root / "proc/self/status"):
        if line.startswith("VmSize:"):
            return limit - _number(line.split()[1]) * 1024
    return limit


def _text(path: Path) -> str:
    """Return the content of a file without the white space around it, `""` if it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _number(text: str) -> int:
    """Return the number in `text`, or -1 for `"max"`, `"unlimited"` and what is missing."""
    try:
        return int(text)
    except ValueError:
        return -1


def _unescape(path: str) -> str:
    """Return a path of mountinfo, in which spaces are written as octal numbers."""
    return path.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
