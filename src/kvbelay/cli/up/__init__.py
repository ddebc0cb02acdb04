"""``kvbelay up``: prefill and decode servers and the router before them, from one command to Ctrl-C."""
