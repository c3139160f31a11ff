"""Transports move bytes between two processes, chosen by the scheme of a URL."""
