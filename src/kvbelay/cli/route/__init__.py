"""``kvbelay route``."""
