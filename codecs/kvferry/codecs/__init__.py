"""Codecs turn a layer slice into fewer bytes and back."""

from kvferry.codecs.base import ArrayStage, ByteStage, Codec, CodecConfig, Stage
from kvferry.codecs.decoding import decode_frame, decode_many, decode_row
from kvferry.codecs.pipeline import CodecPipeline
from kvferry.codecs.stages import registry

__all__ = [
    "ArrayStage",
    "ByteStage",
    "Codec",
    "CodecConfig",
    "CodecPipeline",
    "Stage",
    "decode_frame",
    "decode_many",
    "decode_row",
    "registry",
]
