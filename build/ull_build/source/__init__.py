"""What a build reads: checkpoints, drafters, vocabularies."""
