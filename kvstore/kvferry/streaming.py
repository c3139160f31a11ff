"""Layer-wise streaming of KV from prefill to decode: :class:`LayerSender` and :class:`LayerReceiver`."""
