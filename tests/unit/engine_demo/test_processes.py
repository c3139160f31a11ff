from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError
from kvferry.engine.demo import processes
from kvferry.engine.demo.processes import ChildError, Processes, termination_raises


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_fields_of_the_ready_line() -> None:
    line = "ready role=decode listen=tcp://127.0.0.1:7 model='my model'"
    code = f'import time; print("noise\\n{line}", flush=True); time.sleep(60)'
    with Processes() as children:
        fields = children.start("decode", python(code)).wait_ready(deadline_in(30))
    assert fields == {"role": "decode", "listen": "tcp://127.0.0.1:7", "model": "my model"}


def test_a_child_that_ends_is_said_with_the_end_of_its_log() -> None:
    code = "import sys; print('out'); print('\\n'.join(map(str, range(50))), file=sys.stderr); sys.exit(3)"
    with Processes() as children:
        child = children.start("prefill", python(code))
        with pytest.raises(ChildError, match=r"the prefill process ended \(exit status 3\)") as raised:
            child.wait_ready(deadline_in(30))
        assert raised.value.name == "prefill"
        assert raised.value.tail.splitlines()[-1] in ("49", "out")  # python buffers what it prints
        assert len(raised.value.tail.splitlines()) == 15


def test_a_child_that_says_nothing_is_given_up() -> None:
    with Processes() as children:
        child = children.start("gateway", python("import time; time.sleep(60)"))
        with pytest.raises(ChildError, match="not ready in time"):
            child.wait_ready(deadline_in(0.1))


def test_a_child_that_dies_later_is_noticed() -> None:
    with Processes() as children:
        child = children.start("decode", python("import time; print('ready', flush=True); time.sleep(60)"))
        child.wait_ready(deadline_in(30))
        children.check()
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(ChildError, match="signal 9"):
            child.raise_broken()
        with pytest.raises(ChildError, match="the decode process ended"):
            children.check()


def test_a_child_that_ignores_the_request_to_end_is_killed() -> None:
    code = """if True:
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        time.sleep(60)
    """
    with Processes() as children:
        child = children.start("stubborn", python(code))
        child.wait_ready(deadline_in(30))
        handle = os.pidfd_open(child.pid)
        try:
            children.close(timeout_s=0.2)
            with pytest.raises(ProcessLookupError):
                signal.pidfd_send_signal(handle, 0)
        finally:
            os.close(handle)


def test_settings_of_the_user_do_not_reach_the_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFERRY_CACHE_DIR", raising=False)
    monkeypatch.setenv("KVFERRY_DECODE__LISTEN", "tcp://elsewhere:1")
    monkeypatch.setenv("KVFERRY_CONFIG", "/etc/kvferry.toml")
    monkeypatch.setenv("KVFERRY_LOG__LEVEL", "debug")
    code = """if True:
        import os, time
        print("ready", *(f"{k}={v}" for k, v in os.environ.items() if k.startswith("KVFERRY")), flush=True)
        time.sleep(60)
    """
    with Processes() as children:
        fields = children.start("decode", python(code)).wait_ready(deadline_in(30))
    assert fields == {"KVFERRY_LOG__LEVEL": "debug"}


def test_logs_are_kept_where_asked(tmp_path: Path) -> None:
    with Processes(tmp_path / "logs") as children:
        children.start(
            "decode", python("import time; print('ready a=b', flush=True); time.sleep(60)")
        ).wait_ready(deadline_in(30))
    assert (tmp_path / "logs" / "decode.log").read_text() == "ready a=b\n"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot keep logs"):
        Processes(tmp_path / "file" / "logs")


def test_a_request_to_end_unwinds_the_stack() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as raised, termination_raises():
        signal.raise_signal(signal.SIGTERM)
    assert raised.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    seen = []

    def body() -> None:
        with termination_raises():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body, name="kvferry-test")
    thread.start()
    thread.join(20)
    assert seen == [signal.getsignal(signal.SIGTERM)]


def test_the_environment_keeps_what_is_not_ours() -> None:
    assert processes._environment({"PATH": "/bin", "kvferry_x": "1"}) == {"PATH": "/bin"}
