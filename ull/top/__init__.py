"""`ull top`: a live view of a running daemon, made of what it answers to `stats` and `health`."""
