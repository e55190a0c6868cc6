"""What Horovod's callbacks have in common here: they bring the parameter server into `fit`."""

from __future__ import annotations

from typing import Any

import keras

from hps_keras import cluster
from hps_keras.callbacks.parameter_server import ParameterServer, bring_server


class Carrier(keras.callbacks.Callback):
    """Puts a :class:`ParameterServer` into the callbacks of `fit` when none is listed.

    So a script that lists any of Horovod's callbacks trains over the workers, and its server serves.

    Attributes:
        server: The `ParameterServer` of the running `fit`, None in a world of one process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.server: ParameterServer | None = None

    def set_model(self, model: Any) -> None:
        """Finds or brings the parameter server."""
        super().set_model(model)
        if not cluster.current().alone:
            self.server = bring_server(self)
