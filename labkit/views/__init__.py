"""Views: what you see."""
