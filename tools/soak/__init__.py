"""Endurance: storms of transfers over `stream` and `file` through `Belay`, and what they leave. See `make soak`."""
