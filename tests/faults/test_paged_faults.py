"""The daemon is killed or stopped while blocks go to and from an engine's pages."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.client import Client, ClientOptions, Registration
from kvferry.core.clock import deadline_in
from kvferry.core.errors import KVFerryError, LeaseExpiredError, UnavailableError
from kvferry.core.regions import Region
from kvferry.testing.blocks import save_blocks, small_spec, stop_process, wait_until
from kvferry.testing.processes import Command

LAYERS = 4
SPEC = small_spec("paged-faults", layers=LAYERS)
PAGES = 12


class Gate:
    """An event that is done when the test says so."""

    done = False

    def query(self) -> bool:
        return self.done


class Engine:
    """A client with registered pages."""

    def __init__(self, url: str, call_timeout_s: float = 5.0) -> None:
        self.client = Client(url, ClientOptions(call_timeout_s=call_timeout_s))
        self.namespace = self.client.namespace(SPEC)
        shape = (LAYERS, 2, PAGES, SPEC.block_tokens, 1, SPEC.layers[0].tensors[0].shape[-1])
        self.bytes: npt.NDArray[np.uint8] = np.random.default_rng(2).integers(0, 255, shape, np.uint8)
        regions = [Region.of(self.bytes[n], layer=n, layout="stacked_nhd") for n in range(LAYERS)]
        self.pages: Registration = self.namespace.register(regions)
        self.keys = self.namespace.keys([1] * 3 * SPEC.block_tokens)

    def close(self) -> None:
        self.client.close()


def serve(folder: Path, url: str, listen: str = "tcp://127.0.0.1:0") -> Command:
    socket = f"{folder}/d.sock" if url == "unix" else "none"
    listen = "none" if url == "unix" else listen
    return Command(
        *("serve", "--socket", socket, "--capacity", "1MiB", "--disk", "none", "--http", "none"),
        *("--set", f"daemon.listen={listen}", "--set", "store.lease=30s"),
    )


@pytest.fixture(params=["unix", "tcp"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def daemon(tmp_path: Path, url: str) -> Iterator[Command]:
    with serve(tmp_path, url) as command:
        yield command


@pytest.fixture
def engine(daemon: Command) -> Iterator[Engine]:
    made = Engine(daemon.wait_ready()["listen"])
    yield made
    made.close()


def test_a_save_whose_daemon_is_killed_fails_and_hangs_nobody(
    tmp_path: Path, daemon: Command, engine: Engine, url: str
) -> None:
    """Half of its layers are in; the next one serves the engine again, with nothing of before."""
    job = engine.pages.save("s", engine.keys, [0, 1, 2], parent=None, deadline=deadline_in(30))
    job.layer(0)
    assert job.wait_layer(0, deadline=deadline_in(20))
    daemon.kill()
    for layer in range(1, LAYERS):
        job.layer(layer)
    assert job.wait(deadline=deadline_in(20))
    assert isinstance(job.error, UnavailableError | LeaseExpiredError)
    assert job.failed_blocks() == (0, 1, 2)
    engine.bytes[:] += 1  # nobody reads the pages any more
    late = engine.pages.save("late", engine.keys, [0, 1, 2], parent=None, deadline=deadline_in(30))
    late.all_layers()
    assert late.wait(deadline=deadline_in(20))
    assert isinstance(late.error, UnavailableError)
    assert [(one.job, one.ok, one.failed) for one in engine.client.poll()] == [
        ("s", False, (0, 1, 2)), ("late", False, (0, 1, 2)),
    ]  # fmt: skip
    with serve(tmp_path, url, engine.client.url) as second:
        second.wait_ready()
        wait_until(lambda: not engine.client.away)
        again = engine.pages.save("again", engine.keys, [0, 1, 2], parent=None, deadline=deadline_in(30))
        again.all_layers()
        assert again.wait(deadline=deadline_in(20))
        assert (again.ok, again.stored) == (True, 3)


def test_a_load_whose_daemon_is_killed_is_right_or_failed(daemon: Command, engine: Engine) -> None:
    """What was leased stays as it is until the lease is over; past that it is not taken for valid."""
    save_blocks(engine.namespace, engine.keys)
    with engine.namespace.load(engine.keys, deadline=deadline_in(20)) as lease:
        stored = [bytes(lease.view(index)) for index in range(3)]
    gates = [Gate(), Gate()]
    leases = [engine.namespace.load(engine.keys, deadline=deadline_in(20)) for _ in gates]
    jobs = [
        engine.pages.load(str(n), lease, range(3 * n, 3 * n + 3), after=gates[n], deadline=deadline_in(30))
        for n, lease in enumerate(leases)
    ]
    daemon.kill()
    wait_until(lambda: engine.namespace.lookup(engine.keys).prefix == 0)
    gates[0].done = True
    assert jobs[0].wait(deadline=deadline_in(20))
    assert jobs[0].ok, jobs[0].error
    loaded = engine.bytes[:, :, :3].transpose(2, 0, 1, 3, 4, 5)
    assert [page.tobytes() for page in loaded] == stored
    leases[1].expires_at = time.monotonic()  # as if its time were over
    gates[1].done = True
    assert jobs[1].wait(deadline=deadline_in(20))
    assert isinstance(jobs[1].error, LeaseExpiredError)
    assert jobs[1].failed_blocks() == (3, 4, 5)
    before = engine.bytes.copy()
    miss = engine.namespace.load(engine.keys, deadline=deadline_in(20))
    nothing = engine.pages.load("miss", miss, [6, 7, 8], deadline=deadline_in(30))
    assert nothing.wait(deadline=deadline_in(20))
    assert nothing.failed_blocks() == (6, 7, 8)
    np.testing.assert_array_equal(engine.bytes, before)


def test_a_hung_daemon_holds_up_no_load_and_no_cancel(daemon: Command, engine: Engine) -> None:
    """The thread that copies waits for nobody, so what is leased already is loaded meanwhile."""
    save_blocks(engine.namespace, engine.keys)
    lease = engine.namespace.load(engine.keys, deadline=deadline_in(20))
    other = engine.namespace.keys([2] * 3 * SPEC.block_tokens)
    stop_process(daemon.process.pid)
    try:
        save = engine.pages.save("s", other, [0, 1, 2], parent=None, deadline=deadline_in(0.7))
        save.all_layers()
        load = engine.pages.load("l", lease, [6, 7, 8], deadline=deadline_in(30))
        assert load.wait(deadline=deadline_in(20))
        assert load.ok
        assert save.wait(deadline=deadline_in(20))
        assert isinstance(save.error, KVFerryError)
        assert save.failed_blocks() == (0, 1, 2)
        started = time.monotonic()
        late = engine.pages.save("late", other, [0, 1, 2], parent=None, deadline=deadline_in(0.3))
        late.cancel()
        assert time.monotonic() - started < 20, "cancel waited for the daemon"
        assert late.done
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    wait_until(lambda: engine.namespace.lookup(engine.keys).prefix == 3)
    assert engine.namespace.lookup(other).prefix == 0
    wait_until(lambda: engine.client.stats().leases == 0)
    assert engine.client.stats().quarantined_nbytes == 0
