"""The command line and what is printed."""
