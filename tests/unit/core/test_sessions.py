import gc
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from kvferry.core.errors import StoreError
from kvferry.core.sessions import Session


def watches() -> int:
    """Descriptors of processes; others come and go with what earlier tests left to the collector."""
    gc.collect()
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one of this very look
            count += "[pidfd]" in str(path.readlink())
    return count


def test_a_session_without_a_process_ends_by_word() -> None:
    session = Session("engine")
    told: list[str] = []
    session.on_end(lambda: told.append("first"))
    assert not session.ended
    session.end()
    session.end()
    assert session.ended
    assert session.writers_gone
    assert told == ["first"]
    session.on_end(lambda: told.append("late"))
    assert told == ["first", "late"]
    assert repr(session) == "Session('engine')"
    assert Session("engine").session_id != session.session_id


def test_a_session_ends_with_its_process() -> None:
    before = watches()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        session, other = Session("a", pid=child.pid), Session("b", pid=child.pid)
        assert not session.ended
        other.end()
        assert other.ended
        assert not other.writers_gone
        assert child.stdin is not None
        child.stdin.close()
        # The watch is on the process: it is over before anybody has waited for it.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert session.ended
        assert session.writers_gone
        assert other.writers_gone
        assert session.ended
        assert f"pid={child.pid}" in repr(session)
        third = Session("c", pid=os.getpid())
        assert not third.ended
        del third
    assert watches() == before
    with pytest.raises(StoreError, match=f"no process {child.pid}"):
        Session("gone", pid=child.pid)
