"""See :mod:`kvferry.core.process`."""

from kvferry.core.process import StopSignal, is_loopback, listening, print_ready, require_loopback

__all__ = ["StopSignal", "is_loopback", "listening", "print_ready", "require_loopback"]
