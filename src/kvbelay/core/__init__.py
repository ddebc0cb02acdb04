"""Pure decisions: no I/O, no clock, no threads. Events in, actions out."""
