"""What UCX is on this machine, looked at in a process of its own: the library may end the one it is in."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Final

import msgspec

from kvferry.core.errors import ConnectError, KVFerryError, error_from_code
from kvferry.transports.ucx.context import UcxReport, effective_settings, get_context
from kvferry.transports.ucx.settings import parse_address

__all__ = ["look_from_outside"]

_SAID_NBYTES: Final = 300


class _Answer(msgspec.Struct):
    """What the child prints: a report, or the error instead."""

    report: UcxReport | None = None
    code: str = ""
    message: str = ""


def look_from_outside(timeout_s: float, address: str = "") -> UcxReport:
    """As :func:`effective_settings`, by a child process that has ``timeout_s``.

    Args:
        timeout_s: For all of it.
        address: With its options, and what it requires is there.

    Raises:
        ConnectError: If UCX ended it, or it did not answer; with what it said.
        KVFerryError: What :func:`effective_settings` raised there, or what the address requires and UCX
            has not.
    """
    command = [sys.executable, "-m", "kvferry.transports.ucx.report", address]
    try:
        ran = subprocess.run(command, check=False, capture_output=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise ConnectError(f"UCX did not answer within {timeout_s:g} s") from error
    except OSError as error:
        raise ConnectError(f"no process to look at UCX can be started: {error.strerror}") from error
    said = ran.stderr.decode(errors="replace").strip()[-_SAID_NBYTES:]
    if ran.returncode < 0:
        name = signal.Signals(-ran.returncode).name
        raise ConnectError(f"UCX ended the process that looked at it ({name}): {said}")
    try:
        answer = msgspec.json.decode(ran.stdout, type=_Answer)
    except msgspec.MsgspecError as error:
        raise ConnectError(f"the process that looked at UCX failed: {said}") from error
    if answer.report is None:
        raise error_from_code(answer.code, answer.message)
    return answer.report


def _main() -> None:
    try:
        address = sys.argv[1]
        if address:
            get_context(parse_address(address)[1])
        answer = _Answer(effective_settings(address))
    except KVFerryError as error:
        answer = _Answer(code=error.code, message=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    _main()
