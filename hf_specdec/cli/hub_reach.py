"""Whether the Hub answers, asked once before something is looked for there.

huggingface_hub asks six times for a file that it has no copy of, with pauses of half a minute in
all, before it says that there is no network.
"""

from __future__ import annotations

import os
from typing import Any

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled


def check_reachable(name: Any, what: str) -> None:
    """Raise ValueError if a repository would have to come from a Hub that doesn't answer.

    Whether the repository is there is not asked: whoever loads it says it better.

    Args:
        name: Hub id or folder; anything else is left alone.
        what: the argument's name in the message.
    """
    if not isinstance(name, str) or os.path.exists(name):
        return
    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
        url = hf_hub_url(name, "config.json", endpoint=constants.ENDPOINT)
        get_hf_file_metadata(url)
    except (HFValidationError, HfHubHTTPError, OfflineModeIsEnabled):
        # No id, or an answer, or not to be asked.
        return
    except Exception as error:  # of the HTTP library, which is huggingface_hub's choice
        raise ValueError(
            f"{what} {name}: there is no such folder here and no copy in the cache, and the Hub "
            f"({constants.ENDPOINT}) can't be reached ({error or type(error).__name__}). Connect "
            "to the network or name a folder; HF_HUB_OFFLINE=1 keeps to what is on this machine"
        ) from None
