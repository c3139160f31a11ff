"""Where the time to the first token went.

The marks come from three processes. Each is converted to the gateway's clock before it gets here;
what the estimate of a clock's offset leaves over (microseconds) is clamped away, so that the parts
are never negative and always sum up to the total.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = [
    "Marks",
    "TimeToFirstToken",
    "clock_offset",
    "on_our_clock",
    "overlap",
    "time_to_first_token",
    "transfer_rate",
    "with_token_sent",
]


@dataclass(frozen=True, slots=True)
class Marks:
    """Moments of one request, all on the gateway's monotonic clock, in seconds.

    Attributes:
        arrived: The request was read at the gateway.
        prefill_started: The prefill worker began to compute.
        kv_written: The last layer's KV of the prompt was written at the prefill worker.
        kv_complete: The decode worker held all KV.
        token_sent: Token 0 left the gateway.
    """

    arrived: float
    prefill_started: float
    kv_written: float
    kv_complete: float
    token_sent: float


@dataclass(frozen=True, slots=True)
class TimeToFirstToken:
    """Seconds to the first token and its parts; ``total`` is exactly their sum, in this order."""

    total: float
    queue: float
    prefill: float
    transfer_exposed: float
    first_decode: float

    def as_dict(self) -> dict[str, float]:
        """The figures by name."""
        return {
            "total": self.total,
            "queue": self.queue,
            "prefill": self.prefill,
            "transfer_exposed": self.transfer_exposed,
            "first_decode": self.first_decode,
        }


def clock_offset(estimate: float, error: float) -> float:
    """A peer's clock minus ours, from the estimate of its handshake and that one's error bound.

    An estimate that does not differ from zero by more than its error is taken as zero: processes of one
    host share the clock, and those of two hosts, which count from their starts, differ by far more.
    """
    return estimate if abs(estimate) > error else 0.0


def on_our_clock(peer_time: float, clock_offset: float) -> float:
    """A moment of a peer's clock on ours; ``clock_offset`` is its clock minus ours."""
    return peer_time - clock_offset


def time_to_first_token(marks: Marks) -> TimeToFirstToken:
    """Split the time from arrival to token 0 into its parts, clamped to be monotone."""
    end = max(marks.arrived, marks.token_sent)
    started = min(max(marks.arrived, marks.prefill_started), end)
    written = min(max(started, marks.kv_written), end)
    complete = min(max(written, marks.kv_complete), end)
    queue, prefill = started - marks.arrived, written - started
    exposed, first = complete - written, end - complete
    return TimeToFirstToken(queue + prefill + exposed + first, queue, prefill, exposed, first)


def overlap(transfer_exposed: float, wire_s: float) -> float | None:
    """Share of the time on the wire that was hidden behind compute; ``None`` if nothing was sent."""
    return 1.0 - transfer_exposed / wire_s if wire_s > 0 else None


def transfer_rate(kv_nbytes: int, wire_s: float) -> float | None:
    """GB/s (10^9 bytes) while the wire was busy; ``None`` if nothing was sent."""
    return kv_nbytes / wire_s / 1e9 if wire_s > 0 else None


def with_token_sent(marks: Marks, at: float) -> Marks:
    """The same marks with the moment at which token 0 really left."""
    return replace(marks, token_sent=at)
