"""From prefill's hands into a layer stream."""

from __future__ import annotations

from kvferry.engine.paged_kv import Sequence
from kvferry.engine.prefill import Emit
from kvferry.streaming import LayerSender, PageSender

__all__ = ["emit_to"]


def emit_to(sender: LayerSender | PageSender, prompt_tokens: int) -> Emit:
    """What :func:`~kvferry.engine.prefill.prefill` calls to stream each layer straight from the paged KV.

    The stream must have begun. Nothing is copied: the pages must stay as they are until the sender has
    finished or was aborted.

    Args:
        sender: Takes the layers; queues, never blocks. One of pages, if they are on a device.
        prompt_tokens: Length of the prompt; the last block may be partial.
    """
    if isinstance(sender, PageSender):
        return _emit_pages(sender)
    missing = sender.missing

    def emit(sequence: Sequence, layer: int, first_token: int, stop_token: int) -> None:
        kv = sequence.kv
        size = kv.block_tokens
        blocks = []
        for number in range(first_token // size, -(-stop_token // size)):
            if number not in missing:
                continue
            rows = min(size, prompt_tokens - number * size)
            blocks.append((number, kv.tensor_views(layer, sequence.blocks[number], rows)))
        if blocks:
            sender.put_layer(layer, blocks)

    return emit


def _emit_pages(sender: PageSender) -> Emit:
    def emit(sequence: Sequence, layer: int, first_token: int, stop_token: int) -> None:
        kv = sequence.kv
        numbers = range(first_token // kv.block_tokens, -(-stop_token // kv.block_tokens))
        event = kv.pool.record()
        if event is None:  # the kernels are done, unless the pool has failed
            kv.pool.require_open()
        sender.put_layer(layer, [(n, sequence.blocks[n]) for n in numbers], event)

    return emit
