"""As there."""
