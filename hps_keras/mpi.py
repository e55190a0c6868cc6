"""The MPI of this Python environment: its library, the launcher that belongs to it, and what a launcher promised.

mpi4py joins whichever MPI library it finds, and only that library's own launcher starts processes that find each other:
any other one starts N processes that each believe to be alone. This module finds the pair and recognises the mismatch.
It never joins MPI itself, and importing it costs nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping

# Each launcher describes its job to the ranks in a variable of its own. They come first because under Hydra and PRRTE
# the SLURM_STEP_* variables describe the daemons of the launcher, one a node, and not the ranks.
_LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def expected_world_size(environ: Mapping[str, str]) -> tuple[int, str | None]:
    """Return how many ranks the launcher of this process meant to start.

    A `COMM_WORLD` of another size means that the launcher and the MPI library do not belong together, as with
    `srun --mpi=none`: each of the processes would train alone and in silence.

    `SLURM_NTASKS` is not looked at: batch scripts have it too, and under Hydra and PRRTE it counts daemons.

    Args:
        environ: The environment of the process, usually `os.environ`.

    Returns:
        The number of ranks and the variable that says so; `(1, None)` for a process that no launcher started.
    """
    for name in _LAUNCHER_VARIABLES:
        size = _positive_integer(environ.get(name))
        if size is not None:
            return size, name
    if environ.get("SLURM_STEP_ID"):
        size = _positive_integer(environ.get("SLURM_STEP_NUM_TASKS"))
        if size is not None:
            return size, "SLURM_STEP_NUM_TASKS"
    return 1, None


def _positive_integer(text: str | None) -> int | None:
    """Return the number that `text` is, or None for anything but a whole number from 1."""
    if text is None or not (text.isascii() and text.isdigit()):
        return None
    return int(text) or None
