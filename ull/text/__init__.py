"""Text to ids and back: the tokenizer, chat templates, and what clients write that must stay text."""
