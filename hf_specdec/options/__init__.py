"""What a user may ask for, in words: configs, schedules, vLLM's names. Imports no torch."""
