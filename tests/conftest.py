"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# Time-outs per example would fail on a busy machine; pytest's own time-out is enough.
settings.register_profile("house", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")
