"""The link between two engines: digests of KV, what is left of leases, causes, and news of death.

One connection a pair of engines, beside the connectors that move the data. Nothing waits for it: what it is asked is
answered later, through `Links.take`; a link that is down costs only what it would have told.
"""
