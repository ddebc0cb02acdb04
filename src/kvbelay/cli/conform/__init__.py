"""``kvbelay conform``: the conformance kit for authors of connectors."""
