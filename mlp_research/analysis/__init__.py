"""Saved runs and what is asked of them: predictions, gradients, curvature, export."""
