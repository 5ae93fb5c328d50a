"""Readers: the outside world to the words of `model`. They may block; they never judge."""
