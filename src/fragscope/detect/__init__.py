"""Samples in, verdicts out: pure folds without clock, I/O, threads or logging."""
