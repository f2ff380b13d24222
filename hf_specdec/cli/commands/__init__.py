"""A file for each command: options, help, checks. Nothing heavy is imported at the top."""
