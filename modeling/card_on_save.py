"""Saved models come with a model card, pushed ones with all that a repository needs.

Boundary: when. What is written is the business of the `Publisher` that the engine sets; without one
(where this file came with a checkpoint, and hf_specdec isn't installed) models are saved and pushed
as transformers does it.
"""

import os
from typing import Any, ClassVar, Protocol


class Publisher(Protocol):
    """What makes a folder of weights presentable."""

    def saved(self, folder: str) -> None:
        """A model was saved in ``folder``."""

    def push(self, model: Any, repo_id: str, **options: Any) -> Any:
        """Do what ``model.push_to_hub(repo_id, **options)`` was asked for."""


class CardOnSave:
    """Goes before ``PreTrainedModel`` in a class's bases."""

    publisher: ClassVar[Publisher | None] = None

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        push_to_hub: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Save as transformers does, and write a model card if the folder has no README.md.

        Args:
            save_directory: the folder.
            is_main_process: whether this process writes config and card.
            state_dict: the weights, if not the model's own.
            push_to_hub: push as well; ``repo_id`` (by default the folder's name) and what else
                `push_to_hub` takes are then among ``kwargs``.
            *args: passed on.
            **kwargs: passed on.
        """
        publisher = CardOnSave.publisher
        pushes = push_to_hub and publisher is not None
        names = ("repo_id", "commit_message", "commit_description", "private", "create_pr")
        options = {name: kwargs.pop(name) for name in names if pushes and name in kwargs}
        super().save_pretrained(  # type: ignore[misc]
            save_directory, is_main_process, state_dict, push_to_hub and not pushes, *args, **kwargs
        )
        if publisher is None or not is_main_process:
            return
        publisher.saved(os.fspath(save_directory))
        if pushes:
            name = os.path.basename(os.path.normpath(save_directory))
            self.push_to_hub(options.pop("repo_id", name), token=kwargs.get("token"), **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:
        """Push weights, config, card, remote code and ``custom_generate``.

        Args:
            repo_id: where to; made if it doesn't exist.
            **options: those of transformers' ``push_to_hub``.

        Returns:
            The commit.
        """
        if CardOnSave.publisher is None:
            return super().push_to_hub(repo_id, **options)  # type: ignore[misc]
        return CardOnSave.publisher.push(self, repo_id, **options)
