"""Machine: what this computer is."""
