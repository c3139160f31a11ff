"""The workers behind the gateway: which are up, which fit together, and which pair is next."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvferry.core.clock import deadline_in
from kvferry.core.errors import KVFerryError
from kvferry.engine.gateway.errors import NoWorkerError
from kvferry.engine.pools import ChannelPools
from kvferry.wire.link_status import CodecLink
from kvferry.wire.messages import Describe, Description, Status, StatusReport

__all__ = ["Fleet", "Pair", "Worker", "mismatch"]

log = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 10.0


class Worker:
    """One worker by its address; its description is absent while it is not up."""

    def __init__(self, address: str, role: str) -> None:
        self.address = address
        self.role = role
        self.description: Description | None = None
        self.problem = "not asked yet"
        self.in_flight = 0
        self.codec_links: tuple[CodecLink, ...] = ()

    def __repr__(self) -> str:
        return f"{self.role} worker {self.address}"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two workers that fit together, and what both serve."""

    prefill: Worker
    decode: Worker
    description: Description


def mismatch(prefill: Description, decode: Description) -> str | None:
    """Why two workers cannot serve one request together; ``None`` if they can. Shows both sides."""
    if prefill.spec.fingerprint() != decode.spec.fingerprint():
        return f"their KV differs: prefill has {prefill.spec.describe()}; decode has {decode.spec.describe()}"
    for name in ("vocab_size", "max_model_len", "eos_token_ids"):
        ours, theirs = getattr(prefill, name), getattr(decode, name)
        if ours != theirs:
            return f"{name} differs: prefill has {ours}, decode has {theirs}"
    return None


class Fleet:
    """Asks all workers what they serve, again and again, and hands out pairs that fit together.

    One thread. A worker that is not up is asked again after ``retry_s``, one that is up after
    ``refresh_s``, so that a restart with another model is noticed. ``refusal`` is asked, in this thread,
    why a worker that describes itself so cannot be used; ``None`` if it can. Thread safe.
    """

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        pools: ChannelPools,
        *,
        connect_timeout_s: float = 5.0,
        retry_s: float = 0.25,
        refresh_s: float = 2.0,
        refusal: Callable[[Description], str | None] | None = None,
    ) -> None:
        self._workers = [
            *(Worker(address, "prefill") for address in prefill),
            *(Worker(address, "decode") for address in decode),
        ]
        self._pools = pools
        self._connect_timeout_s = connect_timeout_s
        self._retry_s = retry_s
        self._refresh_s = refresh_s
        self._refusal = refusal
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._refused: set[str] = set()
        self._turn = 0
        self._thread = threading.Thread(target=self._run, name="kvferry-gateway-fleet", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def close(self) -> None:
        """Stop asking and join the thread."""
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT_S)

    # ---- pairs -----------------------------------------------------------------------------------

    def description(self) -> Description:
        """What can be served now.

        Raises:
            NoWorkerError: If no pair fits; the message says why.
        """
        with self._lock:
            return self._pairs()[0].description

    @contextmanager
    def pair(self) -> Iterator[Pair]:
        """The pair for one request: the one with the least under way, in turn among equals.

        Raises:
            NoWorkerError: If no pair fits; the message says why.
        """
        with self._lock:
            pairs = self._pairs()
            self._turn += 1
            turned = pairs[self._turn % len(pairs) :] + pairs[: self._turn % len(pairs)]
            chosen = min(turned, key=lambda p: p.prefill.in_flight + p.decode.in_flight)
            chosen.prefill.in_flight += 1
            chosen.decode.in_flight += 1
        try:
            yield chosen
        finally:
            with self._lock:
                chosen.prefill.in_flight -= 1
                chosen.decode.in_flight -= 1

    def codec_links(self) -> list[tuple[str, CodecLink]]:
        """What each prefill worker that is up said last of the links that it sends KV over."""
        with self._lock:
            return [(w.address, link) for w in self._workers if w.description for link in w.codec_links]

    def suspect(self, worker: Worker) -> None:
        """A request found a worker gone: ask it again now."""
        log.warning("%r does not answer", worker)
        with self._lock:
            worker.description = None
            worker.problem = "it went away during a request"
        self._wake.set()

    def _pairs(self) -> list[Pair]:
        """All pairs that serve the same as the first one found; the lock is held."""
        found: list[Pair] = []
        for prefill in self._workers:
            for decode in self._workers:
                if prefill.role != "prefill" or decode.role != "decode":
                    continue
                ours, theirs = prefill.description, decode.description
                if ours is None or theirs is None or mismatch(ours, theirs) is not None:
                    continue
                if not found or mismatch(found[0].description, theirs) is None:
                    found.append(Pair(prefill, decode, theirs))
        if not found:
            raise NoWorkerError(f"no pair of a prefill and a decode worker can serve: {self._why()}")
        return found

    def _why(self) -> str:
        reasons = [f"{w!r}: {w.problem}" for w in self._workers if w.description is None]
        reasons += sorted(self._refused)
        return "; ".join(reasons)

    # ---- asking ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            for worker in self._workers:
                if not self._closing:
                    self._ask(worker)
            self._compare()
            down = any(w.description is None for w in self._workers)
            self._wake.wait(self._retry_s if down else self._refresh_s)

    def _ask(self, worker: Worker) -> None:
        description: Description | None = None
        problem = ""
        try:
            deadline = deadline_in(self._connect_timeout_s)
            with self._pools.channel(worker.address, deadline) as channel:
                description = channel.call(Describe(), Description, deadline=deadline)
            if description.role != worker.role:
                problem = f"it is a {description.role} worker, configured as {worker.role}"
                description = None
            elif self._refusal is not None and (refused := self._refusal(description)) is not None:
                problem, description = refused, None
        except KVFerryError as error:
            problem = str(error)
        except Exception as error:
            log.exception("asking %r failed", worker)
            problem = f"{type(error).__name__}; the gateway's log says more"
        if problem and problem != worker.problem:
            log.warning("%r is not usable: %s", worker, problem)
        if description is not None and worker.description is None:
            log.info("%r is up: %s", worker, description.spec.describe())
        links = self._ask_links(worker) if description is not None else ()
        with self._lock:
            worker.description, worker.problem, worker.codec_links = description, problem, links

    def _ask_links(self, worker: Worker) -> tuple[CodecLink, ...]:
        """What it says of the links that it sends KV over; nothing if it does not say."""
        if worker.role != "prefill":  # who sends chooses
            return ()
        deadline = deadline_in(self._connect_timeout_s)
        try:
            with self._pools.channel(worker.address, deadline) as channel:
                return channel.call(Status(), StatusReport, deadline=deadline).codec_links
        except KVFerryError as error:
            log.debug("%r gives no status: %s", worker, error)
            return ()

    def _compare(self) -> None:
        """Say once of each pair that does not fit that it is refused."""
        refused: set[str] = set()
        with self._lock:
            ups = [(w, w.description) for w in self._workers if w.description is not None]
        for prefill, ours in ups:
            for decode, theirs in ups:
                if prefill.role == "prefill" and decode.role == "decode":
                    reason = mismatch(ours, theirs)
                    if reason is not None:
                        refused.add(f"{prefill!r} and {decode!r} are refused as a pair: {reason}")
        for text in sorted(refused - self._refused):
            log.error("%s", text)
        with self._lock:
            self._refused = refused
