"""Codecs on a tier: between memory, which holds KV as it is, and a medium, which holds it encoded.

A tier that takes a codec makes a :class:`TierCodec` from its options, and asks it on the way down for an
encoded block (:meth:`TierCodec.encode`) and on the way up to decode one (:meth:`TierCodec.decode`).
An **encoded block** is the frames of its layer slices (:mod:`kvferry.codecs.frame`), one a layer, each at a
multiple of 64 bytes with zeros between them. It says by itself how it is decoded, so any configuration reads
what another one wrote, but for loss: what has lost something is only given where loss is allowed.

The checksum is the tier's and covers the encoded bytes, as do its room and its figures.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

from kvferry.codecs import CodecPipeline, decode_frame, decode_row
from kvferry.codecs.choice import RAW
from kvferry.codecs.frame import aligned, stage_bytes
from kvferry.codecs.serial import SerialChoice
from kvferry.core.clock import is_past
from kvferry.core.errors import CodecError, ConfigError, CorruptBlockError, KVFerryError, TierError
from kvferry.core.spec import KVSpec
from kvferry.core.tier_plugins import TierOption
from kvferry.store.encoded_block import (
    SLICES_A_CALL,
    BlockCodec,
    EncodedBlock,
    Encoding,
    Memory,
    most_encoded_nbytes,
)
from kvferry.store.tier import ReadOutcome

__all__ = [
    "CODEC_OPTIONS",
    "OFF",
    "BlockCodec",
    "Decoded",
    "EncodedBlock",
    "Encoding",
    "TierCodec",
    "most_encoded_nbytes",
]

_log = logging.getLogger(__name__)
OFF: Final = "off"
CODEC_OPTIONS: Final = ("codec", "allow_lossy", "codec_check")
"""Options of a tier that belong to its codec; :meth:`TierCodec.from_options` takes them."""
_LOSSLESS: Final = ("ebp(bits=4)", "ebp", "split")
_LOSSY: Final = ("int8",)
_CHECKS: Final = ("sample", "always")
_MOST_SPECS: Final = 64
_MEASURED: Final = 5
_UNBOUNDED: Final = 1.0
_again = Memory()
_WORDS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class Decoded(NamedTuple):
    """What became of an encoded block: as the parts of a :class:`~kvferry.store.tier.ReadResult`."""

    outcome: ReadOutcome
    reason: str = ""
    lossy: bool = False


class TierCodec:
    """The codec of one tier, as configured. Thread safe.

    Args:
        text: ``off``, a pipeline, or ``auto``: that which makes writing and reading a block fastest, by what
            the medium and the codecs are seen to do; never one that is predicted slower than no codec.
        allow_lossy: Whether what is stored may lose something, and what has lost something is read.
        check: How often the bound of a lossy codec is checked: ``sample`` or ``always``.
        candidates: What ``auto`` chooses from.
        clock: Monotonic seconds, by which ``auto`` measures what encoding and decoding take.

    Raises:
        ConfigError: For a text that is no pipeline, or a lossy one without ``allow_lossy``.
    """

    def __init__(
        self,
        text: str = OFF,
        *,
        allow_lossy: bool = False,
        check: str = "sample",
        candidates: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if check not in _CHECKS:
            raise ConfigError(f"codec_check is {check!r}, must be one of {', '.join(_CHECKS)}")
        self.adaptive: Final = text == "auto"
        names: tuple[str, ...] = (text,)
        if self.adaptive:
            names = tuple(candidates) or (*_LOSSLESS, *(_LOSSY if allow_lossy else ()))
        try:
            found = [] if text == OFF else [CodecPipeline.parse(name, check=check) for name in names]
        except KVFerryError as error:
            raise ConfigError(f"codec: {error}; write off, auto or a pipeline such as ebp") from error
        lossy = [pipeline.text for pipeline in found if not pipeline.lossless]
        if lossy and not allow_lossy:
            raise ConfigError(
                f"codec: {', '.join(lossy)} is lossy: answers may differ. Set allow_lossy=true if that is "
                "meant, or take a lossless codec such as ebp"
            )
        self.pipelines: Final = {pipeline.text: pipeline for pipeline in found if pipeline.text != RAW}
        self.text: Final = text if self.adaptive else next(iter(self.pipelines), OFF)
        self.check: Final = check
        self.accepts_lossy: Final = allow_lossy
        self.lossy: Final = tuple(lossy)
        self._choice = SerialChoice(tuple(self.pipelines), clock=clock)
        self._clock: Final = clock
        self._names = {_stages(pipeline): name for name, pipeline in self.pipelines.items()}
        self._lock = threading.Lock()
        self._specs: OrderedDict[bytes, BlockCodec] = OrderedDict()
        self._counters: Counter[str] = Counter()
        self._decodes: Counter[str] = Counter()  # measured so far, by pipeline
        self._notes: dict[str, str] = {}
        self._failures: set[str] = set()

    # ---- configuration ------------------------------------------------------------------------------

    @classmethod
    def from_options(cls, where: str, options: Mapping[str, object]) -> tuple[TierCodec, dict[str, object]]:
        """The codec that the table of a tier asks for, and the options that are not the codec's.

        Raises:
            ConfigError: For a wrong value; with ``where`` before it.
        """
        rest = {name: value for name, value in options.items() if name not in CODEC_OPTIONS}
        allow = options.get("allow_lossy", False)
        if isinstance(allow, str):
            allow = _WORDS.get(allow.lower(), allow)
        if not isinstance(allow, bool):
            raise ConfigError(f"{where}.allow_lossy is {allow!r}, must be true or false")
        text, check = options.get("codec", OFF), options.get("codec_check", "sample")
        for name, value in (("codec", text), ("codec_check", check)):
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{where}.{name} is {value!r}, must be text")
        try:
            return cls(str(text), allow_lossy=allow, check=str(check)), rest
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

    def describe(self, given: Collection[str]) -> list[TierOption]:
        """Its options with the values that hold; ``given`` are the names that the table has."""
        values: list[tuple[str, str | bool]] = [
            ("codec", self.text), ("allow_lossy", self.accepts_lossy), ("codec_check", self.check)
        ]  # fmt: skip
        return [
            TierOption(name, value, name in given, str(value).lower(), *_ABOUT[name])
            for name, value in values
        ]

    def announce(self, tier: str) -> None:
        """Say once, at the start of the tier of that name, what is lost."""
        if self.lossy:
            chosen = "may be chosen for" if self.adaptive else "encodes"
            named = ", ".join(self.lossy)
            _log.warning("lossy: tier %s: %s %s what it stores; answers may differ", tier, named, chosen)
        elif self.accepts_lossy:
            _log.warning("lossy: tier %s: what was stored by a lossy codec is read", tier)

    # ---- the way down -------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether blocks are encoded at all."""
        return bool(self.pipelines)

    def of(self, spec: KVSpec) -> BlockCodec:
        """What encodes blocks of ``spec``; told once if that is nothing."""
        name = spec.fingerprint()
        with self._lock:
            if name in self._specs:
                self._specs.move_to_end(name)
                return self._specs[name]
        made = BlockCodec(spec, self.pipelines)
        with self._lock:
            self._specs[name] = made
            while len(self._specs) > _MOST_SPECS:
                self._specs.popitem(last=False)
            if made.unused and spec.model not in self._notes and len(self._notes) < _MOST_SPECS:
                self._notes[spec.model] = made.unused
                _log.warning("codec %s: blocks of %s are %s", self.text, spec.model, made.unused)
        return made

    def encode(
        self,
        data: memoryview,
        spec: KVSpec,
        *,
        lossy: bool = False,
        most: float = math.inf,
        deadline: float = math.inf,
    ) -> EncodedBlock | None:
        """Encode a block.

        Args:
            data: The block.
            spec: What it is.
            lossy: It has lost something already, in another tier. It must be allowed here, and is encoded in
                any case, since only an encoded block says that of itself.
            most: Bytes up to which it pays to store it encoded.
            deadline: Of the call; looked at every 16 slices.

        Returns:
            ``None`` if it is to be stored as it is: it would be larger than ``most``, or so it was chosen.

        Raises:
            TierError: At the deadline.
        """
        codec, name = self.of(spec), self._choice.choose() if self.adaptive else self.text
        if self.adaptive:
            self.count({f"codec_auto_{name if name in codec.pipelines else RAW}": 1})
        if name not in codec.pipelines:
            if not lossy:
                self.count({"codec_kept_blocks": 1} if self.pipelines else {})
                return None
            name = RAW
        began = self._clock()
        found = self._encoded(codec, data, name, deadline)
        if found is None:
            if not lossy:
                self.count({"codec_kept_blocks": 1})
                return None
            name = RAW
            found = codec.encode(data, name, deadline)
        if self.adaptive and name != RAW:
            self._learn(found, spec, self._clock() - began)
        if len(found.data) > most and not lossy:
            self.count({"codec_kept_blocks": 1})
            return None
        encoding = found.encoding._replace(lossy=True, bound=_UNBOUNDED) if lossy else found.encoding
        self.count(
            {
                "codec_encoded_blocks": 1,
                "codec_encoded_nbytes": len(data),
                "codec_stored_nbytes": len(found.data),
                "codec_lossy_blocks": int(encoding.lossy),
            }
        )
        return found._replace(encoding=encoding)

    def _encoded(
        self, codec: BlockCodec, data: memoryview, name: str, deadline: float
    ) -> EncodedBlock | None:
        """``None`` where the pipeline fails: that costs the ratio, not the block."""
        try:
            return codec.encode(data, name, deadline)
        except TierError:
            raise
        except Exception as error:  # noqa: BLE001 - a stage of others may raise anything
            self._failed("encoding", name, error)
            return None

    # ---- the way up ---------------------------------------------------------------------------------

    def takes(self, *, lossy: bool) -> bool:
        """Whether a block that has lost something, or not, is given; one that is not is counted."""
        if lossy and not self.accepts_lossy:
            self.count({"codec_refused_lossy": 1})
            return False
        return True

    def decode(self, data: memoryview, spec: KVSpec, into: memoryview, *, deadline: float) -> Decoded:
        """Decode an encoded block, whichever codec made it.

        Args:
            data: Exactly one encoded block, of which the checksum was compared.
            spec: What the block is.
            into: As long as a block. Undefined unless the outcome is ``HIT``.
            deadline: Of the call; looked at every 16 slices.

        Returns:
            ``MISS`` for one that is of no use here: it has lost something and no loss is allowed (``lossy``),
            or needs a codec that is not installed. It counts as absent, so that it can be written anew.
        """
        try:
            lossy = self._decode(data, spec, into, deadline)
        except CorruptBlockError as error:
            return Decoded(ReadOutcome.CORRUPT, str(error))
        except CodecError as error:
            self.count({"codec_undecodable": 1})
            return Decoded(ReadOutcome.MISS, str(error))
        except TierError as error:
            return Decoded(ReadOutcome.FAILED, str(error))
        except Exception as error:  # noqa: BLE001 - a stage of others may raise anything
            self._failed("decoding", self.text, error)
            self.count({"codec_undecodable": 1})
            return Decoded(ReadOutcome.MISS, f"decoding failed: {type(error).__name__}: {str(error)[:200]}")
        if not self.takes(lossy=lossy):
            return Decoded(ReadOutcome.MISS, LOSSY_REASON, lossy=True)
        return Decoded(ReadOutcome.HIT, lossy=lossy)

    def _decode(self, data: memoryview, spec: KVSpec, into: memoryview, deadline: float) -> bool:
        """Whether it has lost something; not decoded to the end if that is not allowed."""
        at, lossy, began = 0, False, self._clock()
        stages: set[bytes] = set()
        for start in range(0, len(spec.layers), SLICES_A_CALL):
            if is_past(deadline):
                raise TierError("not decoded by the deadline")
            layers = spec.layers[start : start + SLICES_A_CALL]
            slots = [into[spec.layer_slice(start + number)] for number in range(len(layers))]
            row = decode_row(data[at:], layers, slots, lossless_only=not self.accepts_lossy)
            lossy |= row.lossy
            if lossy and not self.accepts_lossy:
                return True
            stages |= row.stages
            at += row.nbytes
        if at != len(data):
            raise CorruptBlockError(f"an encoded block of {len(data)} bytes whose slices take {at}")
        self.count({"codec_decoded_blocks": 1})
        if self.adaptive:
            for name in {self._names[each] for each in stages if each in self._names}:
                self._choice.decoded(name, len(into), self._clock() - began)
        return lossy

    # ---- figures ------------------------------------------------------------------------------------

    def carried(self, way: str, nbytes: int, seconds: float) -> None:
        """The medium took ``seconds`` to take (``way`` is ``write``) or give (``read``) so many bytes.

        For ``auto``: as one thread sees it, without encoding and decoding.
        """
        if self.adaptive and nbytes:
            self._choice.carried(way, nbytes, seconds)

    def _learn(self, block: EncodedBlock, spec: KVSpec, seconds: float) -> None:
        """What encoding took; and decoding, as long as little was read of what that pipeline wrote."""
        name, nbytes = block.encoding.codec, spec.block_nbytes
        self._choice.encoded(name, nbytes, len(block.data), seconds)
        if self._decodes[name] >= _MEASURED:
            return
        self._decodes[name] += 1
        again = _again.take(max(layer.nbytes for layer in spec.layers))
        at, began = 0, self._clock()
        for layer, size in zip(spec.layers, block.sizes, strict=True):
            decode_frame(block.data[at : at + size], layer, again[: layer.nbytes])
            at += aligned(size)
        self._choice.decoded(name, nbytes, self._clock() - began)

    def _failed(self, what: str, name: str, error: Exception) -> None:
        """Count what a stage raised, and say the first of each kind."""
        kind = f"{what}, {type(error).__name__}"
        with self._lock:
            self._counters["codec_failed"] += 1
            known = kind in self._failures or len(self._failures) >= _MOST_SPECS
            self._failures.add(kind)
        if not known:
            _log.error(
                "codec %s: %s failed; blocks are stored as they are or miss", name, what, exc_info=error
            )

    def count(self, numbers: Mapping[str, int]) -> None:
        """Add to counters."""
        with self._lock:
            self._counters.update(numbers)

    def counters(self) -> dict[str, float]:
        """Counts that only grow, for :attr:`~kvferry.store.tier.TierUsage.counters`; none without a codec.

        ``codec_encoded_nbytes`` of KV became ``codec_stored_nbytes``; ``codec_kept_blocks`` were stored as
        they are, since encoded they would take as much; ``codec_out_of_bound`` slices were stored as they
        are for their error; ``codec_failed`` times a stage raised what it must not. ``codec_auto_NAME``:
        blocks for which ``auto`` took that pipeline, or ``raw``.
        """
        with self._lock:
            found = {name: float(count) for name, count in self._counters.items()}
        if self.pipelines:
            counts = [pipeline.counts for pipeline in self.pipelines.values()]
            found = dict.fromkeys(_COUNTERS, 0.0) | found
            if self.adaptive:
                found["codec_switches"] = float(self._choice.status().switches)
            found["codec_out_of_bound"] = float(sum(count["out_of_bound"] for count in counts))
        return found

    def status(self) -> dict[str, str]:
        """Facts for people, for :attr:`~kvferry.store.tier.TierUsage.status`; none without a codec."""
        if not self.pipelines and not self.accepts_lossy:
            return {}
        text = f"{self.text} ({'lossy' if self.lossy else 'lossless'}"
        text += ", lossy blocks are read)" if self.accepts_lossy else ")"
        counts = self.counters()
        before, after = counts.get("codec_encoded_nbytes", 0.0), counts.get("codec_stored_nbytes", 0.0)
        if after:
            text += f", {before / after:.2f} times smaller"
        if self.adaptive:
            text += f": {self._choice.status().line()}"
        with self._lock:
            return {"codec": text, **{f"codec of {model}": why for model, why in self._notes.items()}}


LOSSY_REASON: Final = "it has lost something, and the tier has no allow_lossy, or the reader takes no loss"
_COUNTERS: Final = (
    "codec_encoded_blocks", "codec_encoded_nbytes", "codec_stored_nbytes", "codec_kept_blocks",
    "codec_lossy_blocks", "codec_out_of_bound", "codec_decoded_blocks", "codec_refused_lossy",
    "codec_undecodable", "codec_failed",
)  # fmt: skip
_ABOUT: Final[dict[str, tuple[str, str]]] = {
    "codec": ("off, auto, or a pipeline such as ebp", "What blocks are encoded by on their way to it."),
    "allow_lossy": ("true or false", "Whether a lossy codec may encode, and what one has encoded is read."),
    "codec_check": (
        "one of sample, always",
        "How often the error of a lossy codec is compared.",
    ),
}


def _stages(pipeline: CodecPipeline) -> bytes:
    return stage_bytes(tuple((stage.codec_id, stage.config()) for stage in pipeline.stages))
