"""Workloads: what the ranks execute; plain PyTorch, shared by several labs."""
