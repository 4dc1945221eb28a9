"""The subcommands of `ull`, one module each; `ull.cli` parses the command line and calls them."""
