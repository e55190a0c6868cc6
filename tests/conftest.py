"""What holds for all tests."""

import os
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

# Time-outs per example would fail on a busy machine; pytest's own time-out is enough.
settings.register_profile("house", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

# Unbuffered, print writes a line in pieces, and a launcher mixes those of its ranks: tests read whole lines.
os.environ.pop("PYTHONUNBUFFERED", None)


@pytest.fixture(
    scope="module",
    params=[
        "tensorflow",
        pytest.param("jax", marks=pytest.mark.backend),
        pytest.param("torch", marks=pytest.mark.backend),
    ],
)
def backend(request):
    """Each Keras back end in turn; a module that uses it runs once for each."""
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return request.param
