"""Runs: what did happen. Launch a task on several ranks through torchrun, and keep what came of it."""
