"""Several hosts on this machine, each with a link of its own: network namespaces of Linux on one switch.

    with Links(5, rate="100mbit") as links:
        links.run([sys.executable, "script.py"], ...)     # one rank on each, under hpsrun and MPICH
        print(links.bytes())                              # what has crossed each link since it was made

Each host has its own name, address and network card; `tc` shapes what goes in and what goes out, apart (a link carries
its rate both ways at once). Memory, CPUs and files are those of this machine. Everything is removed on leaving, however
that happens, except by SIGKILL: then the next :class:`Links` removes it. Needs Linux, root, and the programs of
iproute2 and util-linux; :class:`Unavailable` says what is missing. Only the standard library is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

NAMESPACES, FOLDERS = Path("/run/netns"), Path("/run")
PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux", "mount": "mount"}
PREFIX = "hpslink"
CARD, SUBNET = "veth0", "10.79.0"
BURST, LATENCY = "256k", "50ms"
"""A queue of 50 ms, as switches have; packets that find it full are lost, and TCP slows down."""

# What mpiexec starts in place of ssh, as `agent [options] host command ...`. MPI finds out about other hosts by their
# names, so each has one, and /etc/hosts with all of them.
AGENT = """\
#!/bin/sh
while :; do case "$1" in -l|-o|-p|-i|-F) shift 2 ;; -*) shift ;; *) break ;; esac; done
host=$1; shift
exec nsenter --net={namespaces}/"$host" unshare --uts --mount sh -ec '
hostname "$0"; mount --bind "$1" /etc/hosts; cd "$2"; shift 2; exec sh -c "$*"' "$host" {names} {folder} "$@"
"""


class Unavailable(Exception):
    """Says why hosts cannot be made here, and what would help."""


class Traffic(NamedTuple):
    """Bytes that a host has sent to and received from the others, headers of TCP, IP and Ethernet included."""

    sent: int
    received: int


class Links:
    """Makes hosts, and removes them.

    Args:
        hosts: How many.
        rate: Of each link and direction, as `tc` takes it: ``"100mbit"``, ``"1gbit"``; empty for no limit.

    Attributes:
        hosts: Their names.

    Raises:
        Unavailable: On entering it.
    """

    def __init__(self, hosts: int, rate: str = "") -> None:
        if hosts < 1:
            raise ValueError(f"hosts={hosts}: give 1 or more")
        if rate and not re.fullmatch(r"[0-9.]+[kmg]?bit", rate):
            raise ValueError(f"rate={rate!r}: give it as tc takes it, e.g. '100mbit'")
        self.rate = rate
        self.hosts = [f"{PREFIX}{os.getpid()}h{i}" for i in range(hosts)]
        self._switch = f"{PREFIX}{os.getpid()}sw"
        self._folder = FOLDERS / f"{PREFIX}{os.getpid()}"

    def __enter__(self) -> Links:
        check()
        remove_orphans()
        self._signals = {number: signal.signal(number, _exit) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            self._make()
        except BaseException as error:
            self.__exit__()
            if isinstance(error, subprocess.CalledProcessError):
                raise Unavailable(
                    f"`{shlex.join(error.cmd)}` failed ({error.stderr.strip()}): hosts need root on a machine, or in a "
                    "privileged container, whose kernel has network namespaces, veth, bridge and sch_tbf"
                ) from error
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for name in [*self.hosts, self._switch]:
            _remove(name)
        shutil.rmtree(self._folder, ignore_errors=True)
        for number, handler in self._signals.items():
            signal.signal(number, handler)

    def bytes(self) -> dict[str, Traffic]:
        """What has crossed each host's link so far."""
        found = {}
        for host in self.hosts:
            (card,) = json.loads(_do("ip", "-n", host, "-s", "-j", "link", "show", CARD))
            found[host] = Traffic(card["stats64"]["tx"]["bytes"], card["stats64"]["rx"]["bytes"])
        return found

    def on(self, host: str, command: Sequence[str]) -> list[str]:
        """The command line that runs a command on a host."""
        return [str(self._agent), host, f"exec {shlex.join(command)}"]  # so that signals reach it and no shell

    def run(
        self, program: Sequence[str], environ: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program with one rank on each host, under MPICH; its output is captured.

        Raises:
            subprocess.TimeoutExpired: It took longer than so many seconds; it has been ended.
        """
        options = ["-launcher", "ssh", "-launcher-exec", str(self._agent), "-iface", CARD]
        command = [sys.executable, "-m", "hps_keras.launch", "-np", str(len(self.hosts))]
        command += ["--hosts", ",".join(self.hosts), "--mpi-args", shlex.join(options), *program]
        # Left to itself, MPICH finds memory that all these hosts share, and goes round the links.
        network = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": CARD}
        return run(self.on(self.hosts[0], command), {**environ, **network}, timeout)

    def _make(self) -> None:
        self._folder.mkdir()
        names, self._agent = self._folder / "hosts", self._folder / "agent"
        lines = [f"{SUBNET}.{i + 1} {host}" for i, host in enumerate(self.hosts)]
        names.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        quoted = {"namespaces": NAMESPACES, "names": names, "folder": os.getcwd()}
        self._agent.write_text(AGENT.format_map({name: shlex.quote(str(path)) for name, path in quoted.items()}))
        self._agent.chmod(0o755)
        _do("ip", "netns", "add", self._switch)
        _do("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _do("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for number, host in enumerate(self.hosts):
            self._connect(host, f"port{number}", f"{SUBNET}.{number + 1}/24")

    def _connect(self, host: str, port: str, address: str) -> None:
        _do("ip", "netns", "add", host)
        ends = ("peer", "name", port, "netns", self._switch)
        _do("ip", "link", "add", CARD, "netns", host, "type", "veth", *ends)
        _do("ip", "-n", self._switch, "link", "set", port, "master", "bridge")
        _do("ip", "-n", host, "addr", "add", address, "dev", CARD)
        for namespace, card in ((self._switch, port), (host, "lo"), (host, CARD)):
            _do("ip", "-n", namespace, "link", "set", card, "up")
        if self.rate:
            shape = ("root", "tbf", "rate", self.rate, "burst", BURST, "latency", LATENCY)
            for namespace, card in ((host, CARD), (self._switch, port)):
                _do("tc", "-n", namespace, "qdisc", "add", "dev", card, *shape)


def check() -> None:
    """Says in an :class:`Unavailable` what this machine lacks; whether the kernel plays along only trying will tell."""
    if not sys.platform.startswith("linux"):
        raise Unavailable(f"hosts are network namespaces of Linux, and this is {sys.platform}")
    if os.geteuid():
        raise Unavailable("network namespaces need root: run it as root on the machine or in a privileged container")
    for program, package in PROGRAMS.items():
        if not shutil.which(program):
            raise Unavailable(f"there is no `{program}` here: install {package} (Debian: apt-get install {package})")


def remove_orphans() -> None:
    """Removes hosts whose process has ended without doing so."""
    for path in [*NAMESPACES.glob(f"{PREFIX}*"), *FOLDERS.glob(f"{PREFIX}*")]:
        made = re.fullmatch(PREFIX + r"(\d+)(sw|h\d+)?", path.name)
        if made and not Path(f"/proc/{made[1]}").exists():
            _remove(path.name)
            shutil.rmtree(FOLDERS / path.name, ignore_errors=True)


def run(command: Sequence[str], environ: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Runs a job of hpsrun; if it must not go on (time-out, Ctrl-C), it is asked to end, with all its ranks."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(list(command), text=True, env=dict(environ), **pipes) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException:
            process.terminate()  # hpsrun ends its ranks, and kills those that do not listen
            raise
    return subprocess.CompletedProcess(list(command), process.returncode, output)


def _do(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _remove(name: str) -> None:
    """Removes a namespace, with the cards in it, after what still runs there: it would keep the namespace alive."""
    if not (NAMESPACES / name).exists():
        return
    for process in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself meanwhile
            os.kill(int(process), signal.SIGKILL)
    done = subprocess.run(["ip", "netns", "del", name], capture_output=True, text=True)
    if done.returncode:
        print(f"host {name} stays behind: {done.stderr.strip()}", file=sys.stderr)


def _exit(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)
