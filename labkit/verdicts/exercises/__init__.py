"""Exercises, a file a lab; found by name."""
