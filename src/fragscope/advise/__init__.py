"""Advice from what a server really serves. Pure: no clock, no files, no threads."""
