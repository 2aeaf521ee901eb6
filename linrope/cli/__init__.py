"""The command line `linrope`: one file a command, its options beside it."""
