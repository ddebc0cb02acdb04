"""Sinks for what the layer tells its ``watch`` hook, one a file."""
