"""``kvbelay bench``: what it costs, as ratios within one run."""
