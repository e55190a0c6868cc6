"""What fewer bits save and what they lose: bytes beside those of float32, relative errors of groups of tensors.

The relative error of messages is the root of two sums: of the squares of all that they left unsaid, and of all that was
to be said. Sums can be added over tensors, messages, workers and optimizers, so a large gradient counts for more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST_GROUPS = 8
OTHERS = "others"

Squares = Sequence[float]
"""Sum of squares of what was left unsaid, and of what was to be said."""


def tensor_groups(tensors: Sequence[tuple[str, int]]) -> list[str]:
    """Names a group for each tensor: the kind of its layer and its role in it, as ``"dense/kernel"``.

    At most :data:`MOST_GROUPS`: where there are more, the role alone (``"kernel"``); where that is more, too, the
    largest of them and ``"others"``.

    Args:
        tensors: Path and number of elements of each.
    """
    groups = [_kind(path) for path, _ in tensors]
    if len(set(groups)) > MOST_GROUPS:
        groups = [path.split("/")[-1] for path, _ in tensors]
    if len(set(groups)) > MOST_GROUPS:
        elements: Counter[str] = Counter()
        for group, (_, size) in zip(groups, tensors):
            elements[group] += size
        largest = {group for group, _ in elements.most_common(MOST_GROUPS - 1)}
        groups = [group if group in largest else OTHERS for group in groups]
    return groups


def _kind(path: str) -> str:
    """The last two parts of a path, without the number that Keras gives to layers of one kind."""
    *layers, role = path.split("/")
    if not layers:
        return role
    kind, _, number = layers[-1].rpartition("_")
    return f"{kind if kind and number.isdecimal() else layers[-1]}/{role}"


def relative(squares: Squares) -> float:
    """The relative error (RMS over RMS), 0 where there was nothing to be said."""
    unsaid, to_say = squares
    return math.sqrt(unsaid / to_say) if to_say else 0.0


class Traffic:
    """Bytes of payloads in one direction, and what float32 would have needed for them."""

    def __init__(self) -> None:
        self.sent = self.float32 = 0

    def add(self, sent: int, float32: int) -> None:
        """Counts a payload."""
        self.sent, self.float32 = self.sent + sent, self.float32 + float32

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent; 1 where none were."""
        return self.float32 / self.sent if self.sent else 1.0


class Fidelity:
    """What was sent in an epoch or a `fit`, and how true it was.

    Args:
        groups: Names of the groups of all quantized tensors, optimizer after optimizer.

    Attributes:
        up, down: Payloads of pushes and of their answers.
        push_widths, pull_widths: Widths that were used.
    """

    def __init__(self, groups: Iterable[str] = ()) -> None:
        self._groups = list(groups)
        self.up, self.down = Traffic(), Traffic()
        self.push_widths, self.pull_widths = set[int](), set[int]()
        self._pushed = {group: [0.0, 0.0] for group in self._groups}
        self._pulled = [0.0, 0.0]

    def pushed(self, squares: Iterable[Squares]) -> None:
        """Adds the squares of a worker's gradients, tensor by tensor as `groups` were given."""
        for group, one in zip(self._groups, squares):
            _add(self._pushed[group], one)

    def pulled(self, squares: Squares) -> None:
        """Adds the squares of answers."""
        _add(self._pulled, squares)

    def merge(self, other: Fidelity) -> None:
        """Adds what was sent in another period of the same `fit`."""
        self.up.add(other.up.sent, other.up.float32)
        self.down.add(other.down.sent, other.down.float32)
        self.push_widths |= other.push_widths
        self.pull_widths |= other.pull_widths
        for group, squares in other._pushed.items():
            _add(self._pushed[group], squares)
        _add(self._pulled, other._pulled)

    @property
    def push_error(self) -> float:
        """Relative error of the gradients, of all groups together."""
        return relative([sum(column) for column in zip(*self._pushed.values())] or [0.0, 0.0])

    @property
    def push_errors(self) -> dict[str, float]:
        """Relative error of the gradients of each group."""
        return {group: relative(squares) for group, squares in self._pushed.items()}

    @property
    def pull_error(self) -> float:
        """Relative error of the answers that were coded."""
        return relative(self._pulled)

    def logs(self) -> dict[str, float]:
        """What Keras's logs of an epoch tell of it."""
        return {
            "hps/compression_up": self.up.ratio,
            "hps/compression_down": self.down.ratio,
            "hps/pull_error": self.pull_error,
            "hps/push_error": self.push_error,
            **{f"hps/push_error/{group}": error for group, error in self.push_errors.items()},
        }

    def data(self) -> dict[str, Any]:
        """The same of a `fit`, for its summary; nothing where no width was under 32."""
        if min(self.push_widths | self.pull_widths, default=32) == 32:
            return {}
        return {
            "push_bits": sorted(self.push_widths),
            "pull_bits": sorted(self.pull_widths),
            "compression_up": self.up.ratio,
            "compression_down": self.down.ratio,
            "push_error": self.push_error,
            "push_errors": self.push_errors,
            "pull_error": self.pull_error,
        }


def line(data: Mapping[str, Any]) -> str:
    """Says in one line what :meth:`Fidelity.data` holds."""
    saved = " and ".join(f"1/{data[name]:.1f}" for name in ("compression_up", "compression_down"))
    errors = []
    if min(data["push_bits"]) < 32:
        groups = ", ".join(f"{group} {_percent(error)}" for group, error in data["push_errors"].items())
        errors.append(f"{_percent(data['push_error'])} up" + (f" ({groups})" if groups else ""))
    if min(data["pull_bits"]) < 32:
        errors.append(f"{_percent(data['pull_error'])} down")
    widths = f"{_span(data['push_bits'])} bits up, {_span(data['pull_bits'])} bits down"
    return f"{widths}: {saved} of float32's bytes; error {', '.join(errors)}"


def _span(widths: Sequence[int]) -> str:
    return f"{widths[0]}" if len(widths) == 1 else f"{widths[0]}-{widths[-1]}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _add(total: list[float], squares: Squares) -> None:
    total[0] += squares[0]
    total[1] += squares[1]
