"""The protocol without I/O: messages, how they are laid out as bytes, the handshake, wire formats."""
