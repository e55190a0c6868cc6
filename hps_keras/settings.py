"""What can be set for a whole job, at ``hps.init()`` or by environment variable."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from hps_keras.errors import ConfigurationError


@dataclass(frozen=True)
class Settings:
    """What can be set at ``hps.init()`` or by environment variable; an argument wins over its variable.

    Attributes:
        server_ranks: World ranks that become parameter servers; negative ones count from the end. ``HPS_SERVER_RANKS``.
        timeout: Seconds after which a silent rank has failed. ``HPS_TIMEOUT``.
        polling: ``"sleep"`` (a waiting rank uses a few percent of a core) or ``"spin"`` (a whole one, for the least
            latency). ``HPS_POLLING``.
        server_device: ``None`` hides the GPUs from a parameter server; ``"gpu"`` leaves them visible.
            ``HPS_SERVER_DEVICE``.
        servers: Number of parameter servers: 1, or 0 where every rank trains. ``HPS_SERVERS``.
        dedicated_server: Whether a parameter server serves inside ``hps.init()``. ``HPS_DEDICATED_SERVER``.
        collectives: Without a server, who averages gradients: ``"mpi"``, or ``"horovod"``, its own engine.
            ``HPS_COLLECTIVES``.
    """

    server_ranks: tuple[int, ...] = (-1,)
    timeout: float = 600.0
    polling: Literal["sleep", "spin"] = "sleep"
    server_device: str | None = None
    servers: int = 1
    dedicated_server: bool = False
    collectives: str = "mpi"

    def __post_init__(self) -> None:
        if not 0 < self.timeout < 1e9:
            raise ConfigurationError(
                f"timeout={self.timeout!r} (HPS_TIMEOUT): give seconds above 0 and below 1e9, e.g. 600"
            )
        if self.polling not in ("sleep", "spin"):
            raise ConfigurationError(f"polling={self.polling!r} (HPS_POLLING): use 'sleep' or 'spin'")
        if self.server_device not in (None, "cpu", "gpu"):
            raise ConfigurationError(f"server_device={self.server_device!r} (HPS_SERVER_DEVICE): use 'cpu' or 'gpu'")
        if len(set(self.server_ranks)) != len(self.server_ranks):
            raise ConfigurationError(f"server_ranks={list(self.server_ranks)} (HPS_SERVER_RANKS): names a rank twice")
        if len(self.server_ranks) != 1:
            raise ConfigurationError(
                f"server_ranks={list(self.server_ranks)} (HPS_SERVER_RANKS): exactly one parameter server is supported "
                "so far; name one rank"
            )
        if self.servers not in (0, 1):
            raise ConfigurationError(
                f"servers={self.servers} (HPS_SERVERS): give 1, or 0 to train without a parameter server; more than "
                "one is not supported so far"
            )
        if self.collectives not in ("mpi", "horovod"):
            raise ConfigurationError(f"collectives={self.collectives!r} (HPS_COLLECTIVES): use 'mpi' or 'horovod'")
        if not self.servers and self.server_ranks != (-1,):
            _refuse_ranks(self.server_ranks)
        if not self.servers and self.server_device is not None:
            raise ConfigurationError(
                f"server_device={self.server_device!r} (HPS_SERVER_DEVICE) with servers=0 (HPS_SERVERS): no rank "
                "becomes a parameter server; leave one of them out"
            )
        if not self.servers and self.dedicated_server:
            raise ConfigurationError(
                "dedicated_server=True (HPS_DEDICATED_SERVER) with servers=0 (HPS_SERVERS): without a parameter server "
                "none can be dedicated; leave one of them out"
            )
        if self.servers and self.collectives != "mpi":
            raise ConfigurationError(
                f"collectives={self.collectives!r} (HPS_COLLECTIVES) with a parameter server: gradients go to it; give "
                "hps.init(servers=0) too, or leave collectives out"
            )

    @classmethod
    def of(cls, environ: Any = os.environ, **given: Any) -> Settings:
        """Builds the settings from arguments (those not None), else from the environment, else the defaults."""
        readers: dict[str, Callable[[Any], Any]] = {
            "server_ranks": _ranks, "timeout": _seconds, "polling": str, "server_device": str,
            "servers": _whole, "dedicated_server": _yes_or_no, "collectives": str,
        }  # fmt: skip
        if given.keys() - readers.keys():
            raise TypeError(f"no such settings: {', '.join(sorted(given.keys() - readers.keys()))}")
        values = {}
        for name, read in readers.items():
            raw = given.get(name)
            if raw is None:
                raw = environ.get(f"HPS_{name.upper()}") or None
            if raw is not None:
                values[name] = read(raw)
        if values.get("servers") == 0 and "server_ranks" in values:
            _refuse_ranks(values["server_ranks"])  # the default's value, too, where somebody gives it
        return cls(**values)


def _refuse_ranks(ranks: tuple[int, ...]) -> None:
    raise ConfigurationError(
        f"server_ranks={list(ranks)} (HPS_SERVER_RANKS) with servers=0 (HPS_SERVERS): no rank becomes a parameter "
        "server; leave one of them out"
    )


def _ranks(raw: Any) -> tuple[int, ...]:
    parts = raw.split(",") if isinstance(raw, str) else list(raw) if isinstance(raw, Iterable) else [raw]
    try:
        if any(isinstance(part, bool) for part in parts):
            raise TypeError("True and False are no ranks, though they count as 1 and 0")
        return tuple(int(part) if isinstance(part, str) else operator.index(part) for part in parts)
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"server_ranks={raw!r} (HPS_SERVER_RANKS): give world ranks separated by commas, e.g. 0 or -1"
        ) from None


def _seconds(raw: Any) -> float:
    try:
        if isinstance(raw, bool):
            raise TypeError("True and False are no numbers")
        return float(raw)
    except (TypeError, ValueError, OverflowError):
        raise ConfigurationError(f"timeout={raw!r} (HPS_TIMEOUT): give a number of seconds, e.g. 600") from None


def _whole(raw: Any) -> int:
    try:
        if isinstance(raw, bool):
            raise TypeError("True and False are no numbers")
        return int(raw) if isinstance(raw, str) else operator.index(raw)
    except (TypeError, ValueError):
        raise ConfigurationError(f"servers={raw!r} (HPS_SERVERS): give 0 or 1") from None


def _yes_or_no(raw: Any) -> bool:
    known = {True: True, False: False, "1": True, "0": False, "true": True, "false": False, "yes": True, "no": False}
    word = raw.strip().lower() if isinstance(raw, str) else raw
    if not isinstance(word, (bool, str)) or word not in known:
        raise ConfigurationError(f"dedicated_server={raw!r} (HPS_DEDICATED_SERVER): give True or False (1 or 0)")
    return known[word]


def resolve_ranks(server_ranks: tuple[int, ...], world: int) -> tuple[int, ...]:
    """Returns the world ranks that negative ones mean too, ascending.

    Raises:
        ConfigurationError: One does not exist in a world of that size.
    """
    for r in server_ranks:
        if not -world <= r < world:
            raise ConfigurationError(
                f"server_ranks={list(server_ranks)} (HPS_SERVER_RANKS): rank {r} does not exist in a world of {world}; "
                f"give one from 0 to {world - 1}, or a negative one counted from the end"
            )
    return tuple(sorted(r % world for r in server_ranks))
