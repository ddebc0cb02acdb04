"""``kvbelay bench router``: the router between a load and two engines that compute nothing."""
