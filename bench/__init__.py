"""What fragscope costs: measurements against aims, by `make bench`."""
