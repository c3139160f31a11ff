"""The worker processes of the reference engine: prefill and decode."""
