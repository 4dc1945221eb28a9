"""A checkpoint's chat template: it must compile, and is tried with a plain chat, as the daemon would."""

from __future__ import annotations

from pathlib import Path

from ull.errors import CheckpointError, TokenizerError
from ull.text.tokenizer import Tokenizer
from ull_build.progress import Reporter


def check_chat_templates(directory: Path, reporter: Reporter) -> None:
    """Notes a template that refuses a plain chat. Raises CheckpointError for one that does not compile."""
    try:
        tokenizer = Tokenizer(directory)
        try:
            tokenizer.check_templates()
            reason = tokenizer.try_template() if tokenizer.has_chat_template else None
        finally:
            tokenizer.close()
    except TokenizerError as error:
        raise CheckpointError(
            f"{directory}: {error.message}; correct chat_template.jinja (or chat_template in tokenizer_config.json), "
            "or remove it to serve prompts alone",
            error.field or "chat_template",
        ) from error
    if reason is not None:
        reporter.note(f"warning: a plain chat (user, assistant, user) cannot be rendered: {reason}")
