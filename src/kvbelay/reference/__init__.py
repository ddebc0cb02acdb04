"""A small paged-KV engine in numpy: the test oracle and the engine of the demo. It is not fast."""
