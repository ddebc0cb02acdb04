"""``kvbelay demo``: a prefill and a decode process, a real model's KV cache, and faults that strike while it moves."""
