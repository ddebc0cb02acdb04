"""vLLM as the benches need it: its scheduler, its connectors and its configuration, without an engine or a model."""
