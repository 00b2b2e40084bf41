"""Verdicts: what it means."""
