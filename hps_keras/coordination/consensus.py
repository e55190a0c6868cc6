"""How the server reduces what workers bring to an agreement to one decision, the same for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hps_keras.errors import ProtocolError


def consensus(contributions: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Reduces what workers brought to an agreement to one decision; the same on all, whatever the order of arrival.

    Args:
        contributions: Per worker a dictionary with any of ``mean`` (name -> ``[value, weight]``, value a number or
            nested lists of numbers), ``any`` (a flag) and ``chief`` (anything).

    Returns:
        ``mean``: name -> weighted mean over the workers that have the name; those of weight 0 count only when all have
        weight 0, and then all alike. ``any``: whether one flag was set. ``chief``: the value of the lowest rank.

    Raises:
        ProtocolError: A value has not the same shape on all workers.
    """
    ranks = sorted(contributions)
    means: dict[str, Any] = {}
    for name in dict.fromkeys(name for rank in ranks for name in contributions[rank].get("mean", {})):
        entries = [contributions[r]["mean"][name] for r in ranks if name in contributions[r].get("mean", {})]
        # A worker without samples has nothing to say, and often says NaN, which a factor of 0 would not silence.
        entries = [e for e in entries if e[1]] or [[value, 1] for value, _ in entries]
        total = sum(weight for _, weight in entries)
        try:
            means[name] = _mean([value for value, _ in entries], [weight / total for _, weight in entries])
        except ValueError as error:
            raise ProtocolError(
                f"{name!r} has not the same shape on all workers: let all compute it in the same way"
            ) from error
    return {
        "mean": means,
        "any": any(contributions[r].get("any", False) for r in ranks),
        "chief": contributions[ranks[0]].get("chief"),
    }


def _mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    if any(isinstance(value, list) for value in values):
        if not all(isinstance(value, list) for value in values):
            raise ValueError("numbers among lists")
        return [_mean(column, weights) for column in zip(*values, strict=True)]
    if all(value == values[0] for value in values):
        return values[0]  # so that what is equal everywhere (a learning rate) stays bit for bit
    return sum(weight * value for weight, value in zip(weights, values))
