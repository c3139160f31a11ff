"""What the entry point refers to: it fails where ``ucxx`` is missing, so that the registry can say so."""

from __future__ import annotations

from importlib.util import find_spec

from kvferry.transports.ucx.transport import UcxTransport

__all__ = ["UcxTransport"]

if find_spec("ucxx") is None:
    raise ImportError("ucxx is not installed", name="ucxx")
