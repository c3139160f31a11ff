"""What holds for all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
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

# A job that a shell starts in the background ignores ctrl-c, and so would every process started from here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=["native", "numpy"])
def both_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Codecs by the native kernels, and by the others."""
    from kvferry.codecs.kernels import use_kernels
    from kvferry.codecs.native import native

    if request.param == "native" and native().library is None:
        pytest.skip(f"no native kernels: {native().reason}")
    with use_kernels(request.param):
        yield
