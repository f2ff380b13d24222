"""The command `hf-specdec`: parse, call, print.

`app` lists the commands, `commands` holds the options of each and imports nothing heavy before one
runs; each command's work is in a module of its own (`demo`), and what it prints is drawn by
`report` and `streaming`.
"""
