"""Connections to peers: addresses, tuned sockets, framed messages, and proof of who is at the other end."""
