"""What became of requests, stamp by stamp: read from a daemon, for Perfetto and as a picture."""
