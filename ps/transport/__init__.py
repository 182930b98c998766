"""Sockets: channels with deadlines, TLS, and the clients' common part."""
