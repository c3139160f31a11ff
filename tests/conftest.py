"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# The same examples each time, however slow the machine: what fails is the change. Soak draws others.
settings.register_profile(
    "kvferry",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("kvferry")
