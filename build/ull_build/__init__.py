"""ull-build: compiles a Hugging Face checkpoint into an engine bundle."""
