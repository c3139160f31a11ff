"""``kvferry serve`` as a process: its start, what it refuses, and its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from kvferry.cli.daemon_http import Port
from kvferry.client import Client, ClientOptions
from kvferry.core.clock import deadline_in
from kvferry.core.errors import KVFerryError, OverloadedError, TransferTimeoutError, UnavailableError
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec, stop_process, wait_until
from kvferry.testing.processes import Command

SPEC = small_spec("serve")


def serve(folder: Path, *more: str, environment: dict[str, str] | None = None) -> Command:
    words = ["serve", "--socket", f"{folder}/d.sock", "--capacity", "8MiB", "--http", "none"]
    if "--listen" not in more:
        words += ["--listen", "none"]
    return Command(*words, *more, environment=environment)


def disk(folder: Path) -> tuple[str, ...]:
    return ("--disk", f"{folder}/disk", "--disk-capacity", "64MiB")


UNUSED = {
    *("torch", "transformers", "safetensors", "rich", "redis", "obstore", "ucxx", "mooncake", "pandas"),
    *("cryptography", "unittest", "pydoc", "numpy.testing", "numpy.random", "numpy.f2py", "numpy.fft"),
    *("numpy.polynomial", "numpy.ma", "kvferry.engine", "kvferry.bench", "kvferry.device", "kvferry.client"),
    *("kvferry.integrations", "kvferry.streaming", "kvferry.testing"),
}


def cpu_s(pid: int) -> float:
    """Time of processors that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def imported(err: str) -> set[str]:
    """Modules that Python said it imported, for ``-X importtime``."""
    lines = (line.rpartition("|")[2].strip() for line in err.splitlines() if line.startswith("import time:"))
    return set(lines)


@pytest.mark.soak
@pytest.mark.parametrize("files", [0, 10_000])
def test_it_starts_in_a_second(tmp_path: Path, files: int) -> None:
    """Of work, and until the ready line, on a machine that does nothing else; the best of three."""
    words = ("--listen", "tcp://127.0.0.1:0", "--disk", f"{tmp_path}/disk", "--disk-capacity", "256MiB")
    spec = small_spec("starts", layers=1, pages=1)
    if files:
        with serve(tmp_path, *words) as daemon:
            daemon.wait_ready()
            with Client(f"unix://{tmp_path}/d.sock") as client:
                ns = client.namespace(spec)
                for first in range(0, files, 500):
                    keys = ns.keys([first + 1] * 500 * spec.block_tokens)
                    assert save_blocks(ns, keys, seconds=60) == 500
                    assert client.flush(deadline=deadline_in(60))
            assert daemon.terminate() == 0
        assert sum(path.is_file() for path in (tmp_path / "disk").rglob("*")) >= files
    took = []
    for _ in range(3):
        started = time.monotonic()
        with serve(tmp_path, *words) as daemon:
            daemon.wait_ready()
            took.append((time.monotonic() - started, cpu_s(daemon.process.pid)))
            assert daemon.terminate() == 0
    print(f"ready after {min(took)[0]:.2f} s, with {min(took)[1]:.2f} s of work, {files} files on disk")
    assert max(min(wall for wall, _ in took), min(work for _, work in took)) < 1.0


def test_it_starts_with_what_it_needs_and_raises_its_limit_of_files(tmp_path: Path) -> None:
    """Modules are counted, since times say more of the machine: 750 take 0.4 s on one that is idle."""
    words = ("--listen", "tcp://[::1]:0", "--http", "http://127.0.0.1:0", *disk(tmp_path))
    with serve(tmp_path, *words, environment={"PYTHONPROFILEIMPORTTIME": "1"}) as daemon:
        ready = daemon.wait_ready()
        modules = imported(daemon.err)
        assert {"kvferry.daemon.http", "starlette.applications"} <= modules
        assert UNUSED.isdisjoint(modules), UNUSED & modules
        assert len(modules) <= 860
        unix, tcp = ready["listen"].split()
        assert unix == f"unix://{tmp_path}/d.sock"
        assert tcp.startswith("tcp://[::1]:")
        assert not tcp.endswith(":0")
        with Client(tcp) as client:  # C152: a daemon and its client over [::1]
            ns = client.namespace(SPEC)
            keys = ns.keys([1] * 3 * SPEC.block_tokens)
            assert save_blocks(ns, keys) == 3
            with ns.load(keys, deadline=deadline_in(20)) as lease:
                blocks = [lease.view(n) == block_bytes(key, SPEC.block_nbytes) for n, key in enumerate(keys)]
        assert blocks == [True] * 3
        assert (ready["tiers"], ready["memory"]) == ("dram,disk", "8MiB")
        assert int(ready["pid"]) == daemon.process.pid
        limits = Path(f"/proc/{daemon.process.pid}/limits").read_text()
        soft, hard = next(line for line in limits.splitlines() if "open files" in line).split()[3:5]
        assert soft == hard or int(soft) >= 1 << 20


def test_it_loads_nothing_that_it_does_not_use() -> None:
    heavy = "torch transformers safetensors starlette uvicorn prometheus_client redis ucxx mooncake rich"
    program = f"import sys, kvferry.daemon.main; print(sorted(set('{heavy}'.split()) & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--socket", "none"], ["daemon.socket", "daemon.listen"]),
        (["--listen", "tcp://0.0.0.0:0"], ["0.0.0.0", "daemon.listen", "wire.trusted_network"]),
        (["--listen", "inproc://x"], ["inproc://x", "daemon.listen"]),
        (["--listen", "tpc://x:1"], ["tpc://x:1", "daemon.listen", "no transport 'tpc'", "tcp, tls"]),
        (["--disk", "~nobody-of-that-name/x"], ["--disk", "~nobody-of-that-name/x"]),
        (["--socket", "~nobody-of-that-name/x"], ["--socket", "~nobody-of-that-name/x"]),
        (["--set", "daemon.disk=~nobody-of-that-name/x"], ["daemon.disk", "~nobody-of-that-name/x"]),
        (["--credentials", "~nobody-of-that-name/x"], ["--credentials", "~nobody-of-that-name/x"]),
        (["--config", "~nobody-of-that-name/x"], ["configuration file", "~nobody-of-that-name/x"]),
        (["--listen", "none", "--listen", "tcp://127.0.0.1:0"], ["daemon.listen", "beside other values"]),
        (["--listen", "tcp://127.0.0.1:7", "--listen", "tcp://127.0.0.1:7"], ["same place", "daemon.listen"]),
        (["--disk", "none", "--disk-capacity", "1GiB"], ["--disk-capacity", "--disk", "none"]),
        (["--set", "daemon.disk=some/where"], ["daemon.disk", "some/where", "absolute"]),
        (["--disk", "/x", "--set", "store.tiers=disk:/y?capacity=1GiB"], ["daemon.disk", "store.tiers"]),
        (["--capacity", "60TiB"], ["store.dram_capacity", "available"]),
        (["--set", "daemon.sockt=x"], ["daemon.sockt", "did you mean socket"]),
        (["--set", "daemon.arena=both"], ["daemon.arena", "shared, copy"]),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    tmp_path: Path, words: Sequence[str], named: Sequence[str]
) -> None:
    with serve(tmp_path, *words) as daemon:
        assert daemon.wait() == 2
        for name in named:
            assert name in daemon.err
        assert "Traceback" not in daemon.err
        assert not daemon.out


def test_two_on_one_place_are_refused_by_name(tmp_path: Path) -> None:
    """C154: the second says which place is taken, by whom, and which option moves it."""
    with serve(tmp_path, *disk(tmp_path)) as first:
        first.wait_ready()
        with serve(tmp_path, "--disk", "none") as second:
            assert second.wait() == 2
            for name in (f"{tmp_path}/d.sock", "--socket", str(first.process.pid)):
                assert name in second.err
        with serve(tmp_path, "--socket", f"{tmp_path}/other.sock", *disk(tmp_path)) as third:
            assert third.wait() == 2
            for name in (f"{tmp_path}/disk", "--disk", str(first.process.pid)):
                assert name in third.err
        assert first.terminate() == 0


def test_it_drains_and_writes_what_is_not_on_disk_yet(tmp_path: Path) -> None:
    """A write lease may still be committed, nothing new is taken, and all of it is there after a restart."""
    with serve(tmp_path, *disk(tmp_path), "--set", "daemon.drain=1h") as daemon:
        url = daemon.wait_ready()["listen"]
        with Client(url) as client:
            ns = client.namespace(SPEC)
            keys = ns.keys([1] * 9 * SPEC.block_tokens)
            save_blocks(ns, keys[:8])
            lease = ns.reserve(keys[8:], parent=keys[7], deadline=deadline_in(20))
            daemon.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not len(ns.load(keys, deadline=deadline_in(20))))
            with pytest.raises((OverloadedError, UnavailableError)):
                save_blocks(ns, ns.keys([2] * SPEC.block_tokens))
            assert lease.commit() == 1
            assert daemon.wait() == 0
    with serve(tmp_path, *disk(tmp_path)) as daemon, Client(daemon.wait_ready()["listen"]) as client:
        assert client.namespace(SPEC).lookup(keys).tiers == ("disk",) * 9
        assert daemon.terminate() == 0


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with serve(tmp_path, "--disk", "none", "--set", "daemon.drain=1h") as daemon:
        url = daemon.wait_ready()["listen"]
        with Client(url) as client:
            ns = client.namespace(SPEC)
            lease = ns.reserve(ns.keys([1] * SPEC.block_tokens), parent=None, deadline=deadline_in(20))
            daemon.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "second signal" in daemon.err)
            assert daemon.process.poll() is None
            daemon.process.send_signal(signal.SIGTERM)
            assert daemon.wait(20) == 1
            with pytest.raises(KVFerryError):
                lease.commit()


def test_systemd_is_told(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"{tmp_path}/notify")
        manager.settimeout(30)
        with serve(tmp_path, "--disk", "none", environment={"NOTIFY_SOCKET": f"{tmp_path}/notify"}) as daemon:
            assert manager.recv(4096).startswith(b"READY=1\n")
            assert daemon.terminate() == 0
            assert manager.recv(4096).startswith(b"STOPPING=1\n")


def test_a_hang_up_reloads(tmp_path: Path) -> None:
    """Also without credentials, and where it means that a terminal was closed."""
    with serve(tmp_path, "--disk", "none") as daemon:
        daemon.wait_ready()
        daemon.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "SIGHUP: no credentials are configured" in daemon.err)
        assert daemon.terminate() == 0


def test_an_output_that_is_full_costs_a_line(tmp_path: Path) -> None:
    words = ["--socket", f"{tmp_path}/d.sock", "--listen", "none", "--disk", "none", "--http", "none"]
    command = [sys.executable, "-m", "kvferry.cli", "serve", *words]
    told = tmp_path / "err"
    with Path("/dev/full").open("w") as full, told.open("w") as err:
        process = subprocess.Popen(command, stdout=full, stderr=err)
    try:
        wait_until(lambda: "ready line cannot be written" in told.read_text())
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert "No space left on device" in told.read_text()
    assert "Traceback" not in told.read_text()


def test_a_low_limit_of_open_files_is_told_and_leaves_a_reserve(tmp_path: Path) -> None:
    words = ["--socket", f"{tmp_path}/d.sock", "--listen", "none", "--disk", "none", "--http", "none"]
    command = [sys.executable, "-m", "kvferry.cli", "serve", *words]
    told = tmp_path / "err"
    with told.open("w") as err, ExitStack() as stack:
        process = subprocess.Popen(
            ["sh", "-c", 'ulimit -n 230; exec "$@"', "sh", *command],
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        )
        stack.enter_context(process)
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready")
        assert "instead of wire.max_connections=256" in told.read_text()
        for number in range(40):
            client = stack.enter_context(Client(f"unix://{tmp_path}/d.sock"))
            ns = client.namespace(SPEC)
            with suppress(UnavailableError):  # who finds no place
                save_blocks(ns, ns.keys([number] * SPEC.block_tokens))
        process.terminate()
        assert process.wait(60) == 0
    assert "Traceback" not in told.read_text()


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """A process is stopped meanwhile."""
    try:
        stop_process(pid)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_what_an_operator_gave_up_is_not_done_later(tmp_path: Path) -> None:
    """A request to a daemon that is stopped, whose client has gone when it goes on."""
    token = tmp_path / "token"
    token.write_text("correct-horse-battery\n")
    token.chmod(0o600)
    more = ["--http", "http://127.0.0.1:0", "--disk", "none", "--set", f"daemon.token_file={token}"]
    with serve(tmp_path, *more) as daemon:
        url = daemon.wait_ready()["http"]
        host, _, port = url.removeprefix("http://").partition(":")
        with standing_still(daemon.process.pid):
            head = f"POST /admin/drain HTTP/1.1\r\nHost: {host}\r\n"
            head += "Authorization: Bearer correct-horse-battery\r\n"
            for body in (b"{}", b"{ }"):
                with socket.create_connection((host, int(port)), timeout=20) as sock:
                    sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answers = [Port(url).ask("GET", "/ready") for _ in range(5)]
        assert answers == [b'{"ready":true}'] * 5
        metrics = Port(url).ask("GET", "/metrics").decode()
        assert 'kvferry_daemon_http_requests_total{code="200",path="/admin/drain"}' not in metrics
        assert daemon.terminate() == 0


def test_what_a_client_gave_up_is_not_done_later(tmp_path: Path) -> None:
    """The same with a client's verb."""
    with ExitStack() as stack:
        daemon = stack.enter_context(serve(tmp_path, "--disk", "none"))
        url = daemon.wait_ready()["listen"]
        namespace = stack.enter_context(Client(url)).namespace(SPEC)
        keys = namespace.keys([1] * 2 * SPEC.block_tokens)
        save_blocks(namespace, keys)
        impatient = stack.enter_context(Client(url, ClientOptions(call_timeout_s=0.5))).namespace(SPEC)

        def gave_up() -> bool:
            wait_until(lambda: impatient.lookup(keys).prefix == 2)
            with standing_still(daemon.process.pid), pytest.raises((TransferTimeoutError, UnavailableError)):
                impatient.clear()
            with suppress(AssertionError):  # on a busy machine it may be over before it was sent
                wait_until(lambda: "clear is not done: who asked for it has gone" in daemon.err, 5.0)
                return True
            return False

        wait_until(gave_up)
        assert namespace.lookup(keys).prefix == 2
        assert daemon.terminate() == 0
