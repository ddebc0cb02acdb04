"""Fuzzing of every decoder of foreign bytes. See `docs/adr/0013-fuzzing.md`."""
