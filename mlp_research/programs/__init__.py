"""What `fit` trains: one run, or many members of one compiled program."""
