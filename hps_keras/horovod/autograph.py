"""AutoGraph rewrites all that a ``tf.function`` calls; what is ours runs as it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def as_written(function: _Function) -> _Function:
    """Keeps AutoGraph from rewriting a function, which would warn about what it cannot rewrite.

    ``tf.autograph.experimental.do_not_convert`` needs TensorFlow at once, and it may not be there.
    """
    function.__dict__["autograph_info__"] = {}  # AutoGraph's mark of what needs no rewriting
    return function
