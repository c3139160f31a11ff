"""The wire protocol: frames, messages, handshake, and the channel that carries them."""
