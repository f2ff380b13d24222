"""The target model: how it is run over several tokens, and what of it is changed meanwhile."""
