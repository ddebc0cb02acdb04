"""kvbelay: KV cache transfers that cannot take an engine down, hang a request, leak blocks or corrupt an answer."""
