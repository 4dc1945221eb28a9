"""The engine bundle, opened and checked: manifest, layouts, seal, and what a forward leaves of speculation."""
