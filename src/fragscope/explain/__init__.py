"""Log lines in, facts out: pure."""
