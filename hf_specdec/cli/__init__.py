"""The command `hf-specdec`: parse, call, print.

`app` declares the commands and imports nothing heavy before one runs; each command's work is in a
module of its own (`demo`), and what it prints is drawn by `report` and `streaming`.
"""
