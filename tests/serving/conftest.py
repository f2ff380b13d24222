"""Fixtures of the server tests, which need the packages of the extra `serving`."""

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

from serving_server import running, slow

__all__ = ["running", "slow"]
