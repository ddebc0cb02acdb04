"""The command ``kvbelay doctor``."""
