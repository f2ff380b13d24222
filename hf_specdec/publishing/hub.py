"""A folder's way to the Hub, in one commit.

Boundary: the only file that writes to the Hub.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HTTPError

from hf_specdec.publishing.card import CARD_FILE, is_own
from hf_specdec.publishing.facts import check_hub_id
from hf_specdec.publishing.measurements import CURVE_FILE, RESULT_FILE, SPEED_FILE

# Of a drafter's folder: not the checkpoints and caches of its training.
_PUBLISHED = ("*.json", "*.jinja", "*.model", "*.md", "*.py", "*.safetensors", "*.txt", "LICENSE*")


@dataclass(frozen=True)
class Pushed:
    """What was sent.

    Attributes:
        commit: as ``HfApi.upload_folder`` returns it.
        files: sent, relative to the folder.
        kept_card: the repository's own card was left as it is.
    """

    commit: Any
    files: tuple[str, ...]
    kept_card: bool


def files_to_push(folder: Path) -> list[str]:
    """What of a folder belongs on the Hub, relative to it."""
    places = [path for pattern in _PUBLISHED for path in folder.glob(pattern)]
    places += [path for path in (folder / "custom_generate").glob("*") if path.is_file()]
    measured = [folder / name for name in (RESULT_FILE, SPEED_FILE, CURVE_FILE)]
    places += [path for path in measured if path.is_file()]
    names = {path.relative_to(folder).as_posix() for path in places}
    return sorted(name for name in names if not name.startswith("."))


def push_folder(
    folder: Path,
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> Pushed:
    """Make the repository if there is none, let the Hub check the card, and send the files.

    A card in the repository that was not written here stays, if the folder's card was written here:
    what people wrote is never replaced by what a program wrote.

    Args:
        folder: as `publish_folder` leaves it.
        repo_id: owner/name.
        commit_message: of the commit.
        commit_description: of the commit.
        private: whether a new repository is private.
        token: a Hub token; the one of ``hf auth login`` if ``None``.
        revision: branch.
        create_pr: open a pull request instead.

    Raises:
        ValueError: an id or card that the Hub wouldn't take, or no card.
        OSError: the Hub can't be reached, or refuses, as without a token.
    """
    check_hub_id("repo_id", repo_id)
    names = files_to_push(folder)
    if CARD_FILE not in names:
        raise ValueError(f"{str(folder)!r} has no {CARD_FILE}; `hf-specdec publish` writes one")
    text = (folder / CARD_FILE).read_text(encoding="utf-8")
    try:
        ModelCard(text).validate()
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        kept_card = is_own(text) and _has_card_of_someone(api, repo_id, revision)
        if kept_card:
            names.remove(CARD_FILE)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            allow_patterns=names,
            commit_message=commit_message or "Upload drafter with hf_specdec",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )
    except HTTPError as error:
        # Of httpx; those that the Hub itself answered with are OSErrors already.
        if isinstance(error, OSError):
            raise
        raise ConnectionError(f"the Hub can't be reached: {error}") from error
    return Pushed(commit, tuple(names), kept_card)


def _has_card_of_someone(api: HfApi, repo_id: str, revision: str | None) -> bool:
    if not api.file_exists(repo_id, CARD_FILE, revision=revision):
        return False
    file = api.hf_hub_download(repo_id, CARD_FILE, revision=revision)
    return not is_own(Path(file).read_text(encoding="utf-8"))
