"""A seeded engine, pool and card: for the demo and for evaluation, never for production paths."""
