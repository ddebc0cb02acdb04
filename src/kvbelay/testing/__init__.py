"""For authors of connectors: the conformance kit, fault plans, golden traces, simulated time."""
