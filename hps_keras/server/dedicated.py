"""A parameter server that serves to the end of the job and never comes to the script behind it."""

from __future__ import annotations

from typing import NoReturn

from hps_keras.cluster import Cluster
from hps_keras.server.serving import serve


def serve_to_the_end(cluster: Cluster) -> NoReturn:
    """Serves until all workers' processes have ended, and then ends this one.

    All that it needs comes from the workers (see :mod:`hps_keras.server.classes`).

    Raises:
        SystemExit: With 0, when all have ended.
    """
    serve(cluster, None, False)
    raise SystemExit(0)
