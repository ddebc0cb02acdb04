"""``kvbelay bench verify --model``: two vLLM servers over NIXL, with and without verification."""
