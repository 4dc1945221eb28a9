"""Heads that read a target's hidden states, EAGLE-3 and DFlash, in the forms in which they are published."""
