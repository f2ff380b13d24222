"""Drafters for others: model cards, code for people without hf_specdec, the Hub.

Boundary: files of a folder, and their way to the Hub. Nothing here generates or trains.
"""

from hf_specdec.publishing.on_save import register

__all__ = ["register"]
