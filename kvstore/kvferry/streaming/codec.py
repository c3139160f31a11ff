"""How the layers of streams are encoded: what is configured, what the other end decodes, what is chosen."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from kvferry.codecs import CodecPipeline, registry
from kvferry.codecs.adaptive import RAW, AdaptiveChoice, ChoiceStatus
from kvferry.codecs.dedup import DedupCodec
from kvferry.codecs.frame import VERSION
from kvferry.core.buffers import page_aligned
from kvferry.core.errors import CodecError, ConfigError, KVFerryError
from kvferry.core.spec import KVSpec

__all__ = ["Choice", "FixedChoice", "LinkCodec", "StreamCodec", "codec_capabilities"]

_log = logging.getLogger(__name__)
_LOSSLESS: Final = ("ebp(bits=4)", "ebp", "split")
_LOSSY: Final = ("int8(k=range)",)
_MOST_LINKS: Final = 256
_MOST_BUFFERS: Final = 24
_MOST_NAMED: Final = 16


def codec_capabilities() -> tuple[str, ...]:
    """What an end names in its channel options: stages that it decodes, with the version of the format.

    One that is installed but cannot be imported is not among them.
    """
    return tuple(f"codec.{info.name}.{VERSION}" for info in registry.describe() if info.ok)


class Choice(Protocol):
    """Which pipeline encodes the next piece. Thread safe; see :class:`AdaptiveChoice`."""

    def choose(self) -> str:
        """A pipeline, or ``raw``."""
        ...

    @property
    def rests(self) -> bool:
        """Whether the next pieces surely go as they are with no other beside them, until more is reported."""
        ...

    @property
    def quiet_until(self) -> float:
        """Monotonic time up to which all goes as it is and nothing needs to be reported."""
        ...

    def probe(self) -> str:
        """Another pipeline with which the next piece should go, beside what is chosen; or nothing."""
        ...

    def encoded(self, name: str, nbytes: int, encoded_nbytes: int, seconds: float) -> None:
        """What encoding took."""
        ...

    def decoded(self, name: str, nbytes: int, seconds: float) -> None:
        """What decoding took at the other end."""
        ...

    def moved(self, name: str, nbytes: int, seconds: float) -> None:
        """What the whole way took."""
        ...

    def status(self) -> ChoiceStatus:
        """What is used, and why."""
        ...


class FixedChoice:
    """One pipeline, by configuration."""

    def __init__(self, name: str, reason: str) -> None:
        self._status = ChoiceStatus(name, reason, 0.0, (), 0)

    def choose(self) -> str:
        """Always the same."""
        return self._status.chosen

    @property
    def rests(self) -> bool:
        """Whether that is raw."""
        return self._status.chosen == RAW

    @property
    def quiet_until(self) -> float:
        """For ever, or never."""
        return math.inf if self.rests else -math.inf

    def probe(self) -> str:
        """Nothing."""
        return ""

    def encoded(self, name: str, nbytes: int, encoded_nbytes: int, seconds: float) -> None:
        """Nothing is learnt."""

    def decoded(self, name: str, nbytes: int, seconds: float) -> None:
        """Nothing is learnt."""

    def moved(self, name: str, nbytes: int, seconds: float) -> None:
        """Nothing is learnt."""

    def status(self) -> ChoiceStatus:
        """The pipeline and who said so."""
        return self._status


class StreamCodec:
    """The codec of this process's streams, as configured. Thread safe.

    Args:
        text: ``raw``, ``auto`` (chosen by what the link and the codecs are seen to do), or a pipeline.
        allow_lossy: Whether ``auto`` may take lossy pipelines, and streams with lossy pipelines are received.
            A lossy ``text`` says so by itself.
        candidates: What ``auto`` chooses from, beside ``raw``.
        cores: For ``auto``; by default those that this process may use.

    Raises:
        ConfigError: For a text that is no pipeline.
    """

    def __init__(
        self,
        text: str = RAW,
        *,
        allow_lossy: bool = False,
        candidates: Sequence[str] = (),
        cores: int | None = None,
    ) -> None:
        self.cores = cores or len(os.sched_getaffinity(0))
        adaptive = text == "auto"
        names = candidates or (*_LOSSLESS, *(_LOSSY if allow_lossy else ())) if adaptive else (text,)
        try:
            found = [CodecPipeline.parse(name) for name in names]
        except KVFerryError as error:
            raise ConfigError(f"codec of streams: {error}; write raw, auto or a pipeline") from error
        lossy = [pipeline.text for pipeline in found if not pipeline.lossless]
        if lossy and adaptive and not allow_lossy:
            raise ConfigError(f"codec of streams: auto with {', '.join(lossy)} needs allow_lossy=true")
        self.text: Final = text if adaptive else found[0].text
        self.adaptive: Final = adaptive
        self.accepts_lossy: Final = allow_lossy or bool(lossy)
        self.lossy: Final = tuple(lossy)
        self.pipelines: Final = {pipeline.text: pipeline for pipeline in found if pipeline.text != RAW}
        self._lock = threading.Lock()
        self._links: OrderedDict[str, LinkCodec] = OrderedDict()
        self._free: list[memoryview] = []

    def lossy_line(self) -> str:
        """One line that says what is lost, for the start; empty if nothing is."""
        if self.lossy:
            chosen = "may be chosen for" if self.adaptive else "encodes"
            return f"lossy: {', '.join(self.lossy)} {chosen} KV that is streamed; answers may differ"
        return "lossy: streams with lossy codecs are received" if self.accepts_lossy else ""

    def link(self, address: str) -> LinkCodec | None:
        """What is known of the link to ``address``, the same for all streams; ``None`` for ``raw``."""
        if not self.pipelines:
            return None
        with self._lock:
            found = self._links.get(address)
            if found is None:
                found = self._links[address] = LinkCodec(self, address)
            self._links.move_to_end(address)
            while len(self._links) > _MOST_LINKS:
                self._links.popitem(last=False)
            return found

    def check(self, named: Sequence[str], who: str) -> None:
        """Whether a stream that may use the pipelines ``named`` is received.

        Raises:
            CodecError: If one is lossy and this end takes no loss, or is not known here; by name.
        """
        if len(named) > _MOST_NAMED:
            raise CodecError(f"{who}: {len(named)} codecs are named, at most {_MOST_NAMED}")
        for text in named:
            try:
                pipeline = CodecPipeline.parse(text)
            except KVFerryError as error:
                raise CodecError(f"{who}: the codec {text[:80]!r} cannot be decoded here: {error}") from error
            if not pipeline.lossless and not self.accepts_lossy:
                raise CodecError(
                    f"{who}: the codec {pipeline.text!r} is lossy, and this end is configured lossless; set "
                    "stream.allow_lossy=true here, or another stream.codec at the sender"
                )

    def choices(self) -> dict[str, ChoiceStatus]:
        """What is used on each link and why, by address."""
        with self._lock:
            links = list(self._links.values())
        return {link.address: link.status() for link in links}

    def status(self) -> dict[str, str]:
        """The same as one line a link."""
        return {address: choice.line() for address, choice in self.choices().items()}

    def describe(self) -> str:
        """What is configured, and what is used on each link, in one line."""
        lossy = f"{self.text} (lossy accepted)" if self.accepts_lossy else self.text
        return " | ".join([lossy, *(f"{address}: {line}" for address, line in self.status().items())])

    def take(self, nbytes: int) -> memoryview:
        """A buffer of at least ``nbytes``, page-aligned; for :meth:`give` afterwards."""
        with self._lock:
            for index in reversed(range(len(self._free))):  # the last one is the likeliest to be in a cache
                if len(self._free[index]) >= nbytes:
                    return self._free.pop(index)
        return page_aligned(-(-nbytes // (64 << 10)) * (64 << 10))

    def give(self, buffer: memoryview) -> None:
        """Take a buffer back for the next use."""
        with self._lock:
            if len(self._free) >= _MOST_BUFFERS:
                self._free.pop(0)
            self._free.append(buffer)


class LinkCodec:
    """The codec of the streams to one address: negotiated anew for each, learning over all. Thread safe."""

    def __init__(self, codec: StreamCodec, address: str) -> None:
        self.codec: Final = codec
        self.address: Final = address
        self._lock = threading.Lock()
        self._names: tuple[str, ...] | None = None
        self._failed: dict[str, str] = {}
        self._choice: Choice = FixedChoice(RAW, "no stream has begun")

    def agree(self, capabilities: Sequence[str], spec: KVSpec) -> tuple[str, ...]:
        """The pipelines for one stream: those that the other end decodes and that apply to ``spec``."""
        names, why = [], ""
        with self._lock:
            failed = dict(self._failed)
        for name, pipeline in self.codec.pipelines.items():
            missing = [s for s in _stage_names(pipeline) if f"codec.{s}.{VERSION}" not in capabilities]
            reason = f"the other end cannot decode {missing[0]!r}" if missing else pipeline.unsupported(spec)
            if reason := failed.get(name, reason):
                why = f"{name} is not used: {reason}"
            else:
                names.append(name)
        self._adopt(tuple(names), why)
        return tuple(names)

    def _adopt(self, names: tuple[str, ...], why: str) -> None:
        with self._lock:
            if names == self._names:
                return
            self._names, self._choice = names, self._among(names, why)
            if not names:
                _log.warning("streams to %s go as they are: %s", self.address, why)

    def _among(self, names: tuple[str, ...], why: str) -> Choice:
        if not names:
            return FixedChoice(RAW, why)
        if self.codec.adaptive:
            return AdaptiveChoice(names, clock=time.monotonic, cores=self.codec.cores)
        return FixedChoice(names[0], "configured")

    @property
    def choice(self) -> Choice:
        """What chooses for the streams that were agreed last."""
        with self._lock:
            return self._choice

    def failed(self, name: str, error: Exception) -> Choice:
        """The pipeline ``name`` could not encode a piece: it is used no more here, which is told once.

        Returns:
            What chooses from now on.
        """
        with self._lock:
            known = name in self._failed
            why = self._failed.setdefault(name, f"it failed: {type(error).__name__}: {str(error)[:200]}")
            if self._names and name in self._names:
                self._names = tuple(other for other in self._names if other != name)
                self._choice = self._among(self._names, f"{name} is not used: {why}")
            choice = self._choice
        if not known:
            _log.error(
                "streams to %s: %s failed and is not used any more; what it was to encode goes as it is",
                self.address,
                name,
                exc_info=error,
            )
        return choice

    def status(self) -> ChoiceStatus:
        """What is used, and why."""
        return self.choice.status()


def _stage_names(pipeline: CodecPipeline) -> Iterator[str]:
    """Of its stages, and of the codec that one has inside."""
    for stage in pipeline.stages:
        yield stage.codec_id
        if isinstance(stage, DedupCodec):
            yield stage.inner.codec_id
