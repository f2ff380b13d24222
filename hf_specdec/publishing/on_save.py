"""What `hf_specdec.modeling`'s models do when they are saved or pushed; see `CardOnSave`.

Nothing heavy is imported before a model is saved.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

from hf_specdec.modeling.card_on_save import CardOnSave


class CardPublisher:
    """Writes cards for `CardOnSave`."""

    def saved(self, folder: str) -> None:
        """Write a model card, unless there is a README."""
        from hf_specdec.publishing.card import write_model_card
        from hf_specdec.publishing.facts import gather_facts

        try:
            write_model_card(folder, gather_facts(Path(folder)), replace_own=False)
        except (ValueError, OSError) as error:
            # The weights are saved; a card must not make a training run end here.
            warnings.warn(f"{folder} got no model card: {error}", stacklevel=4)

    def push(self, model: Any, repo_id: str, **options: Any) -> Any:
        """See `push_model`."""
        return push_model(model, repo_id, **options)


def push_model(
    model: Any,
    repo_id: str,
    *,
    max_shard_size: int | str = "50GB",
    tags: list[str] | str | None = None,
    **options: Any,
) -> Any:
    """Push a loaded model with all that ``hf-specdec publish`` writes.

    The target's tokenizer comes along if it can be read from ``base_model_name_or_path``. A card in
    the repository that someone else wrote stays as it is.

    Args:
        model: with `CardOnSave`.
        repo_id: owner/name.
        max_shard_size: of the weights.
        tags: more tags for the card.
        **options: those of `hf_specdec.publishing.hub.push_folder`, as in transformers.

    Returns:
        The commit.

    Raises:
        ValueError: what the Hub wouldn't take, or a drafter that doesn't say whose it is.
    """
    from hf_specdec.publishing.folder import PublishOptions, TokenizerError, publish_folder
    from hf_specdec.publishing.hub import push_folder

    named = [tags] if isinstance(tags, str) else list(tags or ())
    wishes = PublishOptions(repo_id=repo_id, tags=tuple(named))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        try:
            publish_folder(folder, wishes)
        except TokenizerError as error:
            warnings.warn(f"pushed without a tokenizer: {error}", stacklevel=4)
            publish_folder(folder, wishes.without_tokenizer())
        return push_folder(folder, repo_id, **options).commit


def register() -> None:
    """Let models write their cards from here on; may be called any number of times."""
    CardOnSave.publisher = CardPublisher()
