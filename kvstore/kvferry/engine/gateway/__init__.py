"""The gateway: HTTP in front, the wire protocol to the workers behind; it never touches KV bytes."""
