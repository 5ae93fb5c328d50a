"""Draws the dashboard from a real Prometheus with Grafana's own components."""
