"""Backends behind one small port, one module or folder each."""
