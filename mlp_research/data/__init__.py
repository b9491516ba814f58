"""Data sets: files, splits, the order of batches, and batches themselves."""
