"""The server around the center: sockets, threads, admission of connections, and waits."""
