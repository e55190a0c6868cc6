"""The widths of a simulated run: fixed, or chosen anew after each pass, as `AdaptiveQuantization` chooses them."""

from __future__ import annotations

from collections.abc import Mapping

from hps_keras.quantization.precision import Precision, resolved_mode
from hps_keras.simulate.scenario import Scenario


class Widths:
    """The present widths of gradients and of answers.

    Args:
        scenario: Says which, or by which policy.

    Attributes:
        bits: They.
        passes: Those of each pass that has ended.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._policies = scenario.policy, scenario.pull_policy
        self._monitor = scenario.monitor
        self._precision: Precision | None = None
        self.bits = scenario.push_bits, scenario.pull_bits
        self.passes: list[tuple[int, int]] = []
        if scenario.policy is not None:
            self._follow(scenario.monitor)

    def _follow(self, monitor: str) -> None:
        self._monitor, self._precision = monitor, Precision(*self._policies, resolved_mode("auto", monitor))
        self.bits = self._precision.bits

    def end_pass(self, values: Mapping[str, float] | None) -> list[str]:
        """Chooses the widths of the next pass.

        Args:
            values: What the parameters are worth; None in timing mode, where widths stay.

        Returns:
            What there is to say of it.
        """
        self.passes.append(self.bits)
        if self._precision is None or values is None:
            return []
        said = []
        if self._monitor not in values and "loss" in values:
            said.append(f"there is no {self._monitor!r} (there are {', '.join(sorted(values))}); the loss decides")
            self._follow("loss")
        if self._monitor in values:
            value, before = values[self._monitor], self.bits
            self.bits = self._precision.next(value)
            if self.bits != before:
                push, pull = self.bits
                said.append(
                    f"after epoch {len(self.passes)}, {self._monitor} {value:.4g}: {push} bits for gradients, {pull} "
                    "for parameters"
                )
        return said
