"""Layer-wise streaming of KV from prefill to decode: :class:`LayerSender` and :class:`LayerReceiver`.

Prefill hands over each layer right after it was written, while the next one computes; decode receives
straight into reserved slots and publishes all blocks at once when the last layer is in place.
"""

from kvferry.streaming.codec import LinkCodec, StreamCodec, codec_capabilities
from kvferry.streaming.grants import SlotGrant
from kvferry.streaming.pages import PageSender, PagesRead
from kvferry.streaming.receiver import LayerReceiver
from kvferry.streaming.segments import STREAM_CAPABILITIES, SegmentGrant, WriterWatch
from kvferry.streaming.sender import LayerSender
from kvferry.streaming.windows import STREAM_WINDOWS, RegionGrant, WindowKeeper, windows_capability

__all__ = [
    "STREAM_CAPABILITIES",
    "STREAM_WINDOWS",
    "LayerReceiver",
    "LayerSender",
    "LinkCodec",
    "PageSender",
    "PagesRead",
    "RegionGrant",
    "SegmentGrant",
    "SlotGrant",
    "StreamCodec",
    "WindowKeeper",
    "WriterWatch",
    "codec_capabilities",
    "windows_capability",
]
