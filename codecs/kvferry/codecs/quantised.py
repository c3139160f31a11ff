"""``int8``, ``int4`` and ``fp8``: fewer bits a value, lossy, with a stated bound of the error."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Final

from kvferry.codecs.base import CodecConfig
from kvferry.codecs.kernels import (
    CHANNEL,
    FP8,
    FP8_PLAIN,
    INT4,
    INT8,
    INT8_RANGE,
    KEEP,
    QUANT,
    TOKEN,
    Operation,
)
from kvferry.codecs.parameters import Parameters
from kvferry.codecs.tensors import TensorCodec
from kvferry.core.spec import TensorSpec

__all__ = ["Fp8Codec", "Int4Codec", "Int8Codec"]

_AXES: Final = ("token", "channel")
_KEYS: Final = (*_AXES, "range", "keep")
_NUMBERS: Final = {"token": TOKEN, "channel": CHANNEL}
_MOST: Final = 0xFFFF
_MOST_INT4: Final = 127


class _Quantised(TensorCodec):
    """What the three share.

    Groups with values that are not finite, or whose magnitudes no scale fits, are kept as they are, bit for
    bit; their neighbours do not notice. The sign of a zero is lost, subnormals become multiples of the step.
    """

    lossless = False
    default_bounds: ClassVar[tuple[float, float]]
    """Of ``k`` tensors, and of others; measured on real models (``docs/codecs.md``) with room above."""

    def __init__(self, given: Parameters, most: int, default_group: int) -> None:
        super().__init__()
        self.group = given.integer("group", default_group, 1, most)
        self.bound = given.fraction("bound")

    def error_bound(self, tensor: TensorSpec) -> float:
        """See :meth:`Codec.error_bound`."""
        k, other = self.default_bounds if self.bound is None else (self.bound, self.bound)
        return k if tensor.name == "k" else other

    @abstractmethod
    def kind(self) -> int:
        """Which code the kernels write."""

    @abstractmethod
    def axis_and_group(self, tensor: TensorSpec) -> tuple[str, int]:
        """Whether groups of ``tensor`` run over a token or a channel, and their length."""

    def operation(self, tensor: TensorSpec) -> Operation:
        """See :meth:`TensorCodec.operation`."""
        axis, group = self.axis_and_group(tensor)
        return Operation(QUANT, self.kind(), _NUMBERS[axis], group)


class Int8Codec(_Quantised):
    """One signed byte a value, and a bfloat16 scale for each group; about 1.94 times smaller.

    Args:
        k: Groups of ``k`` tensors: ``token`` (neighbours in a head), or ``channel`` (neighbours in time),
            which has half the error and fits models whose keys have channels that stick out. ``range``: by
            channel, over the range from the lowest to the highest value, in groups twice as long, since
            each has two parameters; less error yet at the same size. ``keep``: keys stay as they are
            (1.32 times smaller), for answers that hardly ever change.
        group: Values that share a scale; keys of ``range`` twice as many.
        bound: Largest relative L2 error of a tensor (:meth:`Codec.error_bound`); above 0, or the codec's.

    Raises:
        CodecError: For a value outside its range.
    """

    codec_id: ClassVar[str] = "int8"
    default_bounds = (0.025, 0.025)

    def __init__(self, k: str = "token", group: int = 64, bound: float | None = None) -> None:
        given = Parameters(self.codec_id, {"k": k, "group": group, **_bound(bound)})
        super().__init__(given, _MOST, 64)
        self.k = given.choice("k", "token", _KEYS)

    def kind(self) -> int:
        """See the base."""
        return INT8

    def axis_and_group(self, tensor: TensorSpec) -> tuple[str, int]:
        """See the base."""
        return (self.k if tensor.name == "k" else "token"), self.group

    def operation(self, tensor: TensorSpec) -> Operation:
        """See :meth:`TensorCodec.operation`."""
        if tensor.name == "k" and self.k == "keep":
            return KEEP
        if tensor.name == "k" and self.k == "range":
            return Operation(QUANT, INT8_RANGE, CHANNEL, min(2 * self.group, _MOST))
        return super().operation(tensor)

    def config(self) -> CodecConfig:
        """What differs from the defaults."""
        return _given(self, Int8Codec(), "k", "group", "bound")

    @classmethod
    def from_config(cls, config: CodecConfig) -> Int8Codec:
        """Build it from :meth:`config`."""
        return cls(**Parameters(cls.codec_id, config).plain("k", "group", "bound"))


class Int4Codec(_Quantised):
    """Four bits a value, with a step and a lowest value for each group; about 3.2 times smaller.

    After KIVI (Liu et al., 2024): keys are grouped by channel, values by token.

    Args:
        group: Values that share a step; 32, or 64 for 3.55 times at a larger error.
        k: Groups of ``k`` tensors, ``channel`` or ``token``.
        bound: Largest relative L2 error of a tensor (:meth:`Codec.error_bound`); above 0, or the codec's.

    Raises:
        CodecError: For a value outside its range.
    """

    codec_id: ClassVar[str] = "int4"
    default_bounds = (0.1, 0.15)

    def __init__(self, group: int = 32, k: str = "channel", bound: float | None = None) -> None:
        given = Parameters(self.codec_id, {"k": k, "group": group, **_bound(bound)})
        super().__init__(given, _MOST_INT4, 32)
        self.k = given.choice("k", "channel", _AXES)

    def kind(self) -> int:
        """See the base."""
        return INT4

    def axis_and_group(self, tensor: TensorSpec) -> tuple[str, int]:
        """See the base."""
        return (self.k if tensor.name == "k" else "token"), self.group

    def config(self) -> CodecConfig:
        """What differs from the defaults."""
        return _given(self, Int4Codec(), "group", "k", "bound")

    @classmethod
    def from_config(cls, config: CodecConfig) -> Int4Codec:
        """Build it from :meth:`config`."""
        return cls(**Parameters(cls.codec_id, config).plain("group", "k", "bound"))


class Fp8Codec(_Quantised):
    """float8 e4m3, scaled a group (about 1.94 times smaller) or as it is (twice).

    Without a scale a tensor with values above 448, or not finite, is kept as it is. Engines that keep
    fp8 themselves have fp8 tensors, which every codec here leaves alone.

    Args:
        scaled: Whether each group has a scale.
        group: Values that share one.
        bound: Largest relative L2 error of a tensor (:meth:`Codec.error_bound`); above 0, or the codec's.

    Raises:
        CodecError: For a value outside its range.
    """

    codec_id: ClassVar[str] = "fp8"
    default_bounds = (0.04, 0.04)

    def __init__(self, *, scaled: bool = True, group: int = 64, bound: float | None = None) -> None:
        given = Parameters(self.codec_id, {"scaled": scaled, "group": group, **_bound(bound)})
        super().__init__(given, _MOST, 64)
        self.scaled = given.flag("scaled", default=True)

    def kind(self) -> int:
        """See the base."""
        return FP8 if self.scaled else FP8_PLAIN

    def axis_and_group(self, tensor: TensorSpec) -> tuple[str, int]:
        """See the base."""
        del tensor
        return "token", self.group

    def config(self) -> CodecConfig:
        """What differs from the defaults."""
        return _given(self, Fp8Codec(), "scaled", "group", "bound")

    @classmethod
    def from_config(cls, config: CodecConfig) -> Fp8Codec:
        """Build it from :meth:`config`."""
        return cls(**Parameters(cls.codec_id, config).plain("scaled", "group", "bound"))


def _bound(bound: float | None) -> dict[str, float]:
    return {} if bound is None else {"bound": bound}


def _given(codec: object, default: object, *names: str) -> CodecConfig:
    """The parameters of ``codec`` that are not those of ``default``."""
    return {name: getattr(codec, name) for name in names if getattr(codec, name) != getattr(default, name)}
