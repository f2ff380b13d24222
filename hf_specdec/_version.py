"""The version, in a file without imports: reading it needs neither torch nor transformers."""

__version__ = "0.1.0"
