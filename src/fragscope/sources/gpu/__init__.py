"""One file per source of GPU memory figures."""
