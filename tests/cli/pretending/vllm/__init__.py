"""Stands where vLLM would, for tests of what is started and how it ends."""
