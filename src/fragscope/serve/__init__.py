"""The runtime: threads, clock, HTTP."""
