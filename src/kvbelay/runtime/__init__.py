"""The room with threads: runs what the core decides against connectors."""
