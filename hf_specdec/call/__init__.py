"""One call of `generate`: what was asked for, whether that works, and who runs it."""
