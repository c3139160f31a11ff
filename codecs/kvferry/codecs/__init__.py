"""Codecs turn a layer slice into fewer bytes and back."""

from kvferry.codecs.base import Codec, CodecConfig

__all__ = ["Codec", "CodecConfig"]
