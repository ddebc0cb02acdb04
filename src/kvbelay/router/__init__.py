"""The P/D router: requests over HTTP, prefilled here, decoded there, and served whatever becomes of either."""
