"""The server around the center: sockets, threads, who may connect, who waits for what."""
