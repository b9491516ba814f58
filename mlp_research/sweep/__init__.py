"""Sweeps: settings and seeds, and what their differences are worth."""
