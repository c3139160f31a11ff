"""Codecs turn a layer slice into fewer bytes and back."""

from kvferry.codecs.base import ArrayStage, ByteStage, Codec, CodecConfig, Stage
from kvferry.codecs.pipeline import CodecPipeline, decode_frame
from kvferry.codecs.stages import registry

__all__ = [
    "ArrayStage",
    "ByteStage",
    "Codec",
    "CodecConfig",
    "CodecPipeline",
    "Stage",
    "decode_frame",
    "registry",
]
